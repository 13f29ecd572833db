"""Language models of `transformers` as they are: numbers of plain transformers and of ours, checkpoints, generation,
exports."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mimo_train.preflight.check import check
from tests.dist.commands import command
from tests.dist.hf.one_step import BOUND, difference
from tests.dist.hf.test_pretrained import pretrained, tensors
from tests.dist.ranks import run_ranks

COMMON = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, dict] = {
    "llama": {"tie_word_embeddings": True},
    "cohere": {},
    "deepseek_v32": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "num_key_value_heads": 4,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "jetmoe": {
        "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
        "aux_loss_coef": 0.5,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "llama4_text": {"intermediate_size_mlp": 64, "num_local_experts": 4, "moe_layers": [1], "no_rope_layers": [1, 0]},
    "mamba2": {"state_size": 8, "num_heads": 8, "n_groups": 1, "chunk_size": 16},
    "roberta": {
        "is_decoder": True, "pad_token_id": 1, "eos_token_id": 2,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
    "rwkv": {"attention_hidden_size": 32, "context_length": 64, "rescale_every": 1},
    "qwen3_5_text": {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}  # fmt: skip
"""Sizes of tiny models by type; most have no native family."""
NOT_CAUSAL = "bert"
AS_IS = "modules.language.implementation=transformers"
PROMPT, NEW = list(range(40, 60)), 6


def _make(root: Path) -> None:
    import transformers

    for kind, sizes in (FAMILIES | {NOT_CAUSAL: {}}).items():
        torch.manual_seed(1)
        config = transformers.AutoConfig.for_model(kind, **COMMON | sizes)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / kind)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    run_ranks(_make, 1, root)
    return root


def run_of(name: str, run_dir: Path, shards: Path, model: Path, *overrides: str):
    tokens = ("data.tokenizer=bytes", "data.sequence_length=48", "train.iters=4")
    return pretrained(name, run_dir, shards, model, *tokens, *overrides)


def _train(cfgs: dict) -> dict[str, tuple]:
    """On a rank: losses and norms of 4 steps of each run, the batches of the first 2, and the checkpoint after them."""
    from tests.dist.steps import Steps

    done = {}
    for name, cfg in cfgs.items():
        run, batches = Steps(cfg), []
        for _ in range(2):
            done.setdefault(name, []).extend(run.train(1))
            batches.append([_texts(part) for part in run.session.data.current.microbatches])
        folder = str(run.save())
        done[name] = done[name] + run.train(2), batches, folder
    return done


def _texts(microbatch: dict) -> tuple:
    texts = tuple(microbatch[key].numpy().copy() for key in ("input_ids", "labels", "loss_mask"))
    return *texts, np.arange(texts[0].shape[1]) < np.array(microbatch["lengths"])[:, None]


def _plain(folder: Path, batches: list, optim) -> list[tuple[float, float]]:
    """Losses and gradient norms of the same steps by transformers and AdamW."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    trained = [value for value in model.parameters() if value.requires_grad]
    groups = [
        {"params": [value for value in trained if (value.ndim > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, optim.weight_decay), (False, 0.0))
    ]
    adam = torch.optim.AdamW(groups, lr=optim.lr, eps=optim.eps, betas=(optim.beta1, optim.beta2))
    points = []
    for step, microbatches in enumerate(batches):
        tokens = sum(mask.sum() for _, _, mask, _ in microbatches)
        total = 0.0
        for microbatch in microbatches:
            ids, labels, mask, valid = map(torch.from_numpy, microbatch)
            balances = bool(getattr(model.config, "output_router_logits", False))
            output = model(input_ids=ids, **({"attention_mask": valid.long()} if balances else {}))
            losses = torch.nn.functional.cross_entropy(output.logits.float().transpose(1, 2), labels, reduction="none")
            loss = (losses * mask).sum() / tokens
            total += loss.item()
            if balances:
                loss = loss + model.config.aux_loss_coef * output.aux_loss * mask.sum() / tokens
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, optim.clip_grad)
        for group in adam.param_groups:
            group["lr"] = optim.lr * min(1, step / optim.warmup_iters)
        adam.step()
        adam.zero_grad()
        points.append((total, norm.item()))
    return points


def _resume(cfgs: dict) -> dict[str, list]:
    from tests.dist.steps import Steps

    return {name: Steps(cfg).train(2) for name, cfg in cfgs.items()}


def _leave(root: Path, checkpoints: dict[str, str]) -> dict[str, tuple]:
    """Exported by the command: what transformers reads from it; our logits and greedy tokens, and theirs."""
    import transformers

    from tests.dist.hf.asking import logits_here

    left = {}
    for name, checkpoint in checkpoints.items():
        code, said = command(["export", checkpoint, "--to", str(root / name)])
        assert code == 0, said
        model, info = transformers.AutoModelForCausalLM.from_pretrained(root / name, output_loading_info=True)
        ids = torch.tensor([PROMPT])
        with torch.no_grad():
            logits = model(input_ids=ids).logits.numpy()
            options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": NEW}
            if name == "roberta":  # its `generate` gives positions from 0, which its forward pass alone does not
                while ids.size(1) < len(PROMPT) + NEW:
                    ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
            else:
                ids = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            tokens = ids[0, len(PROMPT) :].tolist()
        wrong = [*info["missing_keys"], *info["unexpected_keys"]]
        ours = logits_here(Path(checkpoint), [PROMPT])
        left[name] = wrong, difference(ours, logits), _greedy(Path(checkpoint)), tokens
    return left


def _greedy(checkpoint: Path) -> tuple[list[int], bool]:
    """Tokens, in a batch with another prompt if the class takes batches; and whether it does."""
    from mimo_train.evaluation.generation.decoder import Decoder
    from mimo_train.evaluation.generation.prompts import Prompts
    from mimo_train.evaluation.open_model import open_model

    opened = open_model(checkpoint)
    parts = opened.parts
    decoder = Decoder(parts.pipeline)
    both = [Prompts(opened.cfg, parts.tokenizer).with_inputs(ids, []) for ids in (PROMPT, PROMPT[::-1])]
    together = both if decoder.takes_batch(both) else both[:1]
    logits = decoder.begin(together, len(PROMPT) + NEW)
    tokens = [logits.argmax(-1).tolist()]
    while len(tokens) < NEW:
        tokens.append(decoder.step(tokens[-1]).argmax(-1).tolist())
    return [token for token, *_ in tokens], len(together) > 1


def test_steps_are_those_of_transformers_and_resume_and_export_are_exact(prose, models, tmp_path):
    cfgs = {kind: run_of("gpt_tiny", tmp_path / kind, prose, models / kind, AS_IS) for kind in FAMILIES}
    (trained,) = run_ranks(_train, 1, cfgs)
    expected = run_ranks(_all_plain, 1, models, {kind: trained[kind][1] for kind in FAMILIES}, cfgs)[0]
    for kind, (points, _, _) in trained.items():
        for ours, theirs in zip(points, expected[kind], strict=False):
            assert ours == pytest.approx(theirs, rel=BOUND), kind
    two = ("layout=language_dp2", "optim.distributed_optimizer=true")
    again = {
        kind: run_of(
            "gpt_tiny", tmp_path / f"{kind}_2", prose, models / kind, AS_IS, *two, f"checkpoint.resume={folder}"
        )
        for kind, (_, _, folder) in trained.items()
    }
    (resumed, _) = run_ranks(_resume, 2, again)
    for kind, points in resumed.items():
        for ours, theirs in zip(points, trained[kind][0][2:], strict=True):
            assert ours == pytest.approx(theirs, rel=BOUND), kind
    (left,) = run_ranks(_leave, 1, tmp_path / "out", {kind: folder for kind, (_, _, folder) in trained.items()})
    for kind, (wrong, gap, ours, theirs) in left.items():
        # In evaluation transformers halves the states of RWKV, next to the epsilon of its norms; we do not.
        assert wrong == [] and gap < (1e-3 if kind == "rwkv" else BOUND), kind
        assert ours == (theirs, kind != "rwkv"), kind
        exported, source = tensors(tmp_path / "out" / kind), tensors(models / kind)
        assert exported.keys() == source.keys()
        # No gradient reaches indexers, which would decay.
        assert all(
            exported[name].equal(source[name]) == ("indexer" in name) for name in source if source[name].ndim == 2
        )


def _all_plain(models: Path, batches: dict, cfgs: dict) -> dict:
    return {kind: _plain(models / kind, of_kind, cfgs[kind].optim) for kind, of_kind in batches.items()}


LARGE_STEPS = ("train.iters=2", "optim.warmup_iters=0", "optim.eps=1e-8", "optim.lr=0.05")
ADAPTED = {
    "cohere": (
        "modules.language.lora.targets=[q_proj,'model.model.layers.1.mlp.*']",
        "modules.language.lora.dora=true",
    ),
    "mamba2": ("modules.language.lora.rslora=true",),
}
"""Targets of adapters: some linear layers, and all but the output of Mamba, as in peft."""


def test_adapters_are_those_of_peft(prose, models, tmp_path):
    """They leave as its files, with our logits, and come in again bit for bit; the base stays as it is."""
    lora, two = ("modules.language.lora.rank=3", "modules.language.lora.alpha=5"), ("layout=language_dp2",)
    cfgs = {
        kind: run_of("gpt_tiny", tmp_path / kind, prose, models / kind, *lora, *own, *two, *LARGE_STEPS)
        for kind, own in ADAPTED.items()
    }
    checkpoints = run_ranks(_adapt, 2, cfgs)[0]
    (left,) = run_ranks(_with_peft, 1, models, tmp_path / "out", checkpoints)
    again = {}
    for kind, (paths, gap, changed) in left.items():
        assert gap < BOUND < changed, kind
        assert len(paths) == (5 if kind == "cohere" else 2), paths
        start = f"modules.language.lora.adapter={tmp_path / 'out' / kind}"
        still = ("train.iters=2", "optim.lr=0", "optim.min_lr=0")
        again[kind] = run_of("gpt_tiny", tmp_path / f"{kind}_2", prose, models / kind, start, *still)
    run_ranks(_with_peft, 1, models, tmp_path / "again", run_ranks(_adapt, 1, again)[0])
    for kind in ADAPTED:
        came, went = (tensors(tmp_path / where / kind) for where in ("out", "again"))
        assert came.keys() == went.keys() and all(torch.equal(value, went[name]) for name, value in came.items())


def _adapt(cfgs: dict) -> dict[str, str]:
    from tests.dist.steps import Steps

    done = {}
    for kind, cfg in cfgs.items():
        run = Steps(cfg)
        run.train(2)
        done[kind] = str(run.save())
    return done


def _with_peft(models: Path, root: Path, checkpoints: dict[str, str]) -> dict[str, tuple]:
    """Layers of the exported adapters, the difference of peft's logits and ours, and that to the base model's."""
    import transformers
    from peft import PeftModel

    from tests.dist.hf.asking import logits_here

    left = {}
    for kind, checkpoint in checkpoints.items():
        code, said = command(["export", checkpoint, "--to", str(root / kind)])
        assert code == 0, said
        files = sorted(path.name for path in (root / kind).iterdir())
        tokenizer = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]  # which the base lacks
        assert files == ["adapter_config.json", "adapter_model.safetensors", *tokenizer], files
        model = transformers.AutoModelForCausalLM.from_pretrained(models / kind)
        with torch.no_grad():
            base = model(input_ids=torch.tensor([PROMPT])).logits.numpy()
            adapted = PeftModel.from_pretrained(model, root / kind).eval()
            logits = adapted(input_ids=torch.tensor([PROMPT])).logits.numpy()
        paths = {name.partition(".lora_")[0] for name in tensors(root / kind)}
        ours = logits_here(Path(checkpoint), [PROMPT])
        left[kind] = paths, difference(ours, logits), difference(base, logits)
    return left


VARIANTS = {
    "packed": ("gpt_tiny", ("data.pack=true",)),
    "all logits": ("gpt_tiny", ("train.logits=all",)),
    "recomputed": ("gpt_tiny", ("train.recompute=full",)),
    "images": ("vlm_digits", ("layout=one_process",)),
}


def test_numbers_are_those_of_native_layers(prose, digits, models, tmp_path):
    cfgs = {}
    for name, (config, overrides) in VARIANTS.items():
        for kind in ("native", "transformers"):
            shards = prose if config == "gpt_tiny" else digits
            place, own = tmp_path / name / kind, f"modules.language.implementation={kind}"
            cfgs[name, kind] = run_of(config, place, shards, models / "llama", own, *overrides, "train.iters=2")
    (points,) = run_ranks(_resume, 1, cfgs)
    for name in VARIANTS:
        for native, as_is in zip(points[name, "native"], points[name, "transformers"], strict=True):
            assert as_is == pytest.approx(native, rel=BOUND), name


def test_further_rows_are_drawn_alike_on_every_rank(prose, models, tmp_path):
    more = (
        "layout=language_dp2",
        "modules.language.llm.vocab_size=320",
        "train.iters=1",
        "optim.lr=0",
        "optim.min_lr=0",
    )
    cfg = run_of("gpt_tiny", tmp_path / "run", prose, models / "cohere", *more)
    first, second = run_ranks(_table, 2, cfg)
    stored = tensors(models / "cohere")["model.embed_tokens.weight"].numpy()
    assert first.shape == (320, 32) and (first == second).all() and (first[:300] == stored).all()
    assert 0.01 < first[300:].std() < 0.03
    ((code, said),) = run_ranks(command, 1, ["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")])
    assert code == 0, said
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == 320
    assert (tensors(tmp_path / "out")["model.embed_tokens.weight"].numpy() == first).all()


def _table(cfg):
    from tests.dist.steps import Steps

    run = Steps(cfg)
    run.train(1)
    run.save()
    (parameters,) = ({name: value for name, value in run.parameters().items() if "embed_tokens" in name},)
    (table,) = parameters.values()
    return table.numpy()


IN_FLOAT32 = {
    "dots1": ("e_score_correction_bias", {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 0}),
    "ernie4_5_moe": ("gate.weight", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16,
        "moe_layer_start_index": 0}),
}  # fmt: skip
"""What classes keep in fp32 in a bf16 run, a buffer and a parameter, and their sizes."""


def test_what_a_class_keeps_in_fp32_stays_fp32_in_bf16(prose, tmp_path):
    run_ranks(_make_bf16, 1, tmp_path)
    options = (AS_IS, "train.precision=bf16", "layout=language_dp2", "optim.distributed_optimizer=true")
    cfgs = {kind: run_of("gpt_tiny", tmp_path / f"{kind}_1", prose, tmp_path / kind, *options) for kind in IN_FLOAT32}
    for kind, (gap, points, folder) in run_ranks(_in_bf16, 2, cfgs, tmp_path)[0].items():
        assert gap == 0, kind
        again = run_of(
            "gpt_tiny", tmp_path / f"{kind}_2", prose, tmp_path / kind, *options, f"checkpoint.resume={folder}"
        )
        assert run_ranks(_resume, 2, {kind: again})[0][kind] == points, kind
        ((code, said),) = run_ranks(command, 1, ["export", folder, "--to", str(tmp_path / f"{kind}_out")])
        assert code == 0, said
        before, after = tensors(tmp_path / kind), tensors(tmp_path / f"{kind}_out")
        kept = [name for name in before if name.endswith(IN_FLOAT32[kind][0])]
        assert kept and {name for name, value in after.items() if value.dtype == torch.float32} >= set(kept), kind
        assert all((before[name] == after[name]).all() == (kind == "dots1") for name in kept), kind


def _make_bf16(root: Path) -> None:
    import transformers

    for kind, (kept, sizes) in IN_FLOAT32.items():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(kind, **COMMON | {"num_key_value_heads": 4} | sizes)
        )
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, value in state.items():
            if not name.endswith(kept):
                value.data = value.data.bfloat16()
            elif value.ndim == 1:
                value.normal_(0, 0.02)
        model.save_pretrained(root / kind)


def _in_bf16(cfgs: dict, root: Path) -> dict[str, tuple]:
    """On a rank: difference of logits from those of transformers in bf16; steps after a checkpoint, which has its
    place."""
    import transformers
    from megatron.core.utils import unwrap_model

    from tests.dist.steps import Steps

    done, ids = {}, torch.arange(64)[None] * 7 % 300
    for kind, cfg in cfgs.items():
        run = Steps(cfg)
        (language,) = map(unwrap_model, run.model)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(root / kind, dtype=torch.bfloat16).train()
        with torch.no_grad():
            gap = language(ids, torch.arange(64)[None]) - theirs(input_ids=ids).logits
        run.train(2)
        folder = str(run.save())
        done[kind] = float(gap.abs().max()), run.train(2), folder
    return done


def test_texts_that_see_each_other_are_rejected(prose, models, tmp_path):
    """By config.json, and by the model itself, where config.json does not say it."""
    from mimo_train.config.errors import ConfigError
    from mimo_train.layout.run import resolve

    for kind in ("lfm2", "mamba2", "qwen3_5_text"):
        with pytest.raises(ConfigError, match=r"data\.pack: is true, but the recurrent layers"):
            resolve(run_of("gpt_tiny", tmp_path / kind, prose, models / kind, AS_IS, "data.pack=true"))
    chunked = models / "llama4_text"
    with pytest.raises(ConfigError, match=r"data\.pack_length: a row has 9000 tokens, .* after each 8192"):
        resolve(run_of("gpt_tiny", tmp_path, prose, chunked, AS_IS, "data.pack=true", "data.pack_length=9000"))
    for base, kind, message in (
        ("gpt_tiny", "deepseek_v32", r"data\.pack: is true, .* chooses the tokens"),
        ("vlm_digits", "qwen3_vl", r"data\.pack: is true, .* positions on several axes of modules\.images"),
    ):
        _save_config(tmp_path / kind, kind)
        with pytest.raises(ConfigError, match=message):
            resolve(run_of(base, tmp_path / "run", prose, tmp_path / kind, AS_IS, "data.pack=true"))
    (said,) = run_ranks(
        _probe, 1, {kind: run_of("gpt_tiny", tmp_path, prose, models / kind, AS_IS) for kind in (NOT_CAUSAL, *FAMILIES)}
    )
    assert {kind for kind, text in said.items() if "mixes the documents of a packed row" in text} == {
        "gpt_oss",  # its class gives no positions to the mask
        "lfm2",
        "mamba2",
        "qwen3_5_text",
        "roberta",  # counts positions from another number
        "rwkv",
    }
    assert "tokens of BertLMHeadModel see later ones" in said[NOT_CAUSAL]
    assert sum(text == "" for text in said.values()) == 5
    assert "see later ones in a text of 64" in said["long"]


def _save_config(folder: Path, kind: str) -> None:
    import transformers

    axes = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    sizes = {"text_config": COMMON | axes} if kind == "qwen3_vl" else COMMON
    transformers.AutoConfig.for_model(kind, **sizes).save_pretrained(folder)


def _probe(cfgs: dict) -> dict[str, str]:
    from megatron.core.utils import unwrap_model

    from mimo_train.layout.run import resolve
    from mimo_train.training.step.pipeline import build_parts, start_processes

    said = {}
    for kind, cfg in cfgs.items():
        run = resolve(cfg)
        parts = build_parts(run, *start_processes(cfg))
        (language,) = map(unwrap_model, parts.pipeline.model)
        said[kind] = _dependence(language, packed=True, length=16)
    # Tokens that see later ones, in long rows alone.
    language = unwrap_model(parts.pipeline.model[0])
    language.model.get_input_embeddings().register_forward_hook(
        lambda module, arguments, output: output + output.mean(1, keepdim=True) if output.size(1) > 32 else output
    )
    language._probe._longest = 0
    return said | {"long": _dependence(language, packed=False, length=33)}


def _dependence(language, **row) -> str:
    from mimo_train.config.errors import UserError

    try:
        language._probe.require_independence(**row)
    except UserError as error:
        return str(error)
    return ""


def test_rejected_by_name(prose, models, tmp_path):
    from mimo_train.config.errors import ConfigError
    from mimo_train.layout.run import resolve

    wrong = {
        "modules.language.layout.tp=2": r"modules\.language\.layout\.tp: is 2, but a language model of transformers",
        "modules.language.layout.pp=2": r"modules\.language\.layout\.pp: is 2",
        "modules.language.layout.cp=2": r"modules\.language\.layout\.cp: is 2",
        "modules.language.freeze=['*embedding*']": r"modules\.language\.freeze: '\*embedding\*' matches no parameter",
        "optim.overlap_grad_reduce=true": r"optim\.overlap_grad_reduce: .* may get no gradient",
        "modules.language.layout.ep=2": r"modules\.language\.layout\.ep: is 2",
        "modules.language.implementation=native": "of language models, these can be read",
        "modules.language.implementation=transformer": r"modules\.language\.implementation: .*transformer",
        "train.recompute=selective": r"modules\.language\.recompute: selective requires",
        "train.compile=layers": "class of transformers as it is",
        "modules.language.llm.num_layers=2": "num_layers",
        "modules.language.llm.vocab_size=100": "makes it 300",
    }
    for override, message in wrong.items():
        with pytest.raises(ConfigError, match=message):
            resolve(run_of("gpt_tiny", tmp_path, prose, models / "cohere", override))
    with pytest.raises(ConfigError, match="has output_router_logits, a loss that train.task=simpo does not have"):
        resolve(run_of("gpt_tiny", tmp_path, prose, models / "jetmoe", "train.task=simpo"))
    for change, message in (
        ("missing", "q_proj.weight is missing"),
        ("short", "q_proj.weight is .1, 32., and .32, 32. here"),
    ):
        shutil.copytree(models / "cohere", folder := tmp_path / change)
        values = tensors(folder)
        name = next(name for name in values if name.endswith("q_proj.weight"))
        value = values.pop(name)
        save_file(values | ({name: value[:1].clone()} if change == "short" else {}), folder / "model.safetensors")
        report = check(run_of("gpt_tiny", tmp_path, prose, folder))
        assert any(re.search(message, fault.message) for fault in report.faults), report.faults
    damaged = tmp_path / "quantised"
    damaged.mkdir()
    config = json.loads((models / "lfm2" / "config.json").read_text())
    for more, message in (
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config mxfp4: quantised weights cannot"),
        ({"model_type": "nothing_like_it"}, "of language models, these can be read"),
        ({"num_attention_heads": "many"}, "transformers cannot read it"),
    ):
        (damaged / "config.json").write_text(json.dumps(config | more))
        with pytest.raises(ConfigError, match=message):
            resolve(run_of("gpt_tiny", tmp_path, prose, damaged))
