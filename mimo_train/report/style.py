"""The style sheet of report.html: light and dark, desktop and phone."""

STYLE = """
:root { color-scheme: light dark;
  --page: #f7f7f5; --card: #ffffff; --ink: #1c1f23; --soft: #5a6068; --line: #dcdedb; --grid: #ebecea;
  --good: #14713d; --good-bg: #e4f3e9; --bad: #b0281f; --bad-bg: #fbe8e6;
  --c0: #2563c9; --c1: #b4530a; --c2: #0f766e; --c3: #a3327a; --c4: #6d4fc4; --c5: #66690a; }
@media (prefers-color-scheme: dark) { :root {
  --page: #131518; --card: #1b1e22; --ink: #e8eaed; --soft: #a3aab3; --line: #33383e; --grid: #272b30;
  --good: #6fd39a; --good-bg: #17301f; --bad: #ff9b91; --bad-bg: #3a1c1a;
  --c0: #7cb0ff; --c1: #f2a35e; --c2: #4fc9b8; --c3: #ee86c4; --c4: #b3a0ff; --c5: #cfcf60; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 48px 0 12px; }
h3 { font-size: 0.95rem; margin: 0; }
.subtitle, .note, .axis-name, footer { color: var(--soft); font-size: 0.875rem; }
.subtitle { margin: 6px 0 0; font-size: 1rem; }
.note { margin: 10px 0 0; }
.c0 { --own: var(--c0); } .c1 { --own: var(--c1); } .c2 { --own: var(--c2); }
.c3 { --own: var(--c3); } .c4 { --own: var(--c4); } .c5 { --own: var(--c5); }
.headline { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 1px; margin: 28px 0 0;
  background: var(--line); border: 1px solid var(--line); border-radius: 10px; overflow: hidden; }
.headline div { background: var(--card); padding: 14px 16px; }
.headline dt { color: var(--soft); font-size: 0.8125rem; }
.headline dd { margin: 2px 0 0; font-size: 1.5rem; line-height: 1.25; font-variant-numeric: tabular-nums;
  letter-spacing: -0.01em; }
.headline dd small { display: block; font-size: 0.8125rem; color: var(--soft); letter-spacing: 0; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
.chart, .module, .sample, details, .table { background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
.chart { margin: 0; padding: 16px; min-width: 0; display: flex; flex-direction: column; }
.chart:first-child, .chart:last-child:nth-child(even) { grid-column: 1 / -1; }
.chart:first-child .plot { flex-basis: 300px; }
figcaption { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 4px 20px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; list-style: none; margin: 0; padding: 0;
  font-size: 0.8125rem; }
.legend li { display: flex; align-items: center; gap: 6px; }
.axis-name { margin: 6px 0 0; font-size: 0.75rem; }
.plot { position: relative; flex: 1 0 210px; margin: 10px 10px 38px 46px; font-size: 0.75rem; color: var(--soft);
  font-variant-numeric: tabular-nums; }
.plot > svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.plot span { position: absolute; line-height: 1; white-space: nowrap; }
.plot .y { right: 100%; margin-right: 8px; transform: translateY(-50%); }
.plot .x { top: 100%; margin-top: 8px; transform: translateX(-50%); }
.plot .x-name { right: 0; top: 100%; margin-top: 25px; }
svg path { vector-effect: non-scaling-stroke; fill: none; }
.grid { stroke: var(--grid); stroke-width: 1; } .base { stroke: var(--line); stroke-width: 1; }
.curve { stroke: var(--own); stroke-width: 2; stroke-linejoin: round; }
.curve.raw { stroke-width: 1; opacity: 0.4; }
.curve.dots { stroke-width: 1.5; stroke-dasharray: 4 4; }
.dot { stroke: var(--own); stroke-width: 8; stroke-linecap: round; }
.layout { display: flex; align-items: stretch; gap: 16px; }
.encoders { display: flex; flex-direction: column; gap: 12px; flex: 1 1 0; min-width: 0; }
.module { flex: 1 1 0; min-width: 0; padding: 14px 16px 16px; }
.encoders .module { flex: 1 0 auto; }
.module[class*=" c"] { border-top: 4px solid var(--own); }
.module h3 small { color: var(--soft); font-weight: 400; }
.ranks { display: grid; grid-template-columns: repeat(auto-fill, minmax(132px, 1fr)); gap: 8px; list-style: none;
  margin: 10px 0 0; padding: 0; }
.shared .ranks { grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); }
.ranks li { border: 1px solid var(--line); border-radius: 8px; padding: 8px; text-align: center; font-size: 0.8125rem; }
.ranks .more { display: grid; place-items: center; color: var(--soft); border-style: dashed; }
.rank { display: block; font-weight: 600; margin-bottom: 4px; }
.chip { display: block; border-radius: 5px; padding: 2px 6px; border: 1px solid var(--own); color: var(--own);
  font-size: 0.75rem; font-variant-numeric: tabular-nums;
  background: color-mix(in srgb, var(--own) 8%, transparent); }
.down { display: block; color: var(--soft); line-height: 1.3; }
.arrow { display: flex; flex-direction: column; align-items: center; justify-content: center; gap: 4px;
  color: var(--soft); font-size: 0.75rem; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(210px, 1fr)); gap: 16px; list-style: none;
  margin: 0; padding: 0; }
.sample { overflow: hidden; display: flex; flex-direction: column; }
.pictures { display: flex; background: var(--grid); border-bottom: 1px solid var(--line); }
.pictures img { flex: 1 1 0; min-width: 0; width: 100%; height: 150px; object-fit: contain; padding: 8px; }
.pictures img.small { image-rendering: pixelated; }
.clips audio { display: block; width: 100%; padding: 8px 8px 0; }
.sample dl { margin: 0; padding: 12px 14px; display: grid; grid-template-columns: auto 1fr; gap: 2px 10px;
  font-size: 0.875rem; overflow-wrap: anywhere; }
.sample dt { color: var(--soft); } .sample dd { margin: 0; white-space: pre-wrap; }
.sample .mark { margin: auto 14px 14px; align-self: flex-start; padding: 1px 10px; border-radius: 99px;
  font-size: 0.8125rem; font-weight: 600; }
.right .mark { color: var(--good); background: var(--good-bg); }
.wrong .mark { color: var(--bad); background: var(--bad-bg); }
.table { overflow-x: auto; margin-top: 16px; }
table { border-collapse: collapse; width: 100%; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 16px; text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } tbody tr { border-top: 1px solid var(--line); }
details { padding: 12px 16px; } summary { cursor: pointer; font-weight: 600; }
summary:focus-visible { outline: 2px solid var(--c0); outline-offset: 4px; border-radius: 2px; }
pre { overflow-x: auto; margin: 12px 0 0; font: 0.8125rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
footer { margin-top: 48px; border-top: 1px solid var(--line); padding-top: 12px; }
@media (max-width: 760px) {
  main { padding: 24px 14px 48px; }
  h2 { margin-top: 36px; }
  .charts { grid-template-columns: minmax(0, 1fr); }
  .chart:first-child .plot { flex-basis: 230px; }
  .plot .x.odd { display: none; }
  .headline { grid-template-columns: 1fr 1fr; }
  .headline div:last-child:nth-child(odd) { grid-column: 1 / -1; }
  .layout { flex-direction: column; gap: 10px; }
  .arrow svg { transform: rotate(90deg); margin: 22px 0; }
  th, td { padding: 7px 10px; }
  .samples { grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 12px; }
  .ranks { grid-template-columns: repeat(auto-fill, minmax(128px, 1fr)); }
}
@media print { body { background: none; } .chart, .sample, .module { break-inside: avoid; } }
"""
