"""The sizes of a mixture of experts, and what depends on them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from data.text_format import plural
from encoders.key_rules import MOST_WIDTH
from encoders.weight_map import Rows, Rule, same, with_biases
from mimo_train.config.errors import Fault
from mimo_train.config.keys import changed_fields, key
from mimo_train.models.blocks.base import Block, Linear, Matmul, Share, Width, tp_faults
from mimo_train.models.blocks.mlp.spec import Mlp, MlpKeys


@dataclass
class ExpertKeys(MlpKeys):
    """Keys of layers with experts."""

    num_experts: int = key(0, at_least=0, at_most=2**16)
    """Experts of every layer; 0: a dense model. See docs/layouts.md#experts."""
    experts_per_token: int = key(2, at_least=0, at_most=2**16)
    """Experts per token."""
    router_score_function: str = key("softmax", choices=("softmax", "sigmoid"))
    """`softmax`, or `sigmoid`, whose chosen scores are divided by their sum (DeepSeek-V3, arXiv 2412.19437)."""
    router_renormalise: bool = True
    """Softmax over the chosen experts. `false`, or one expert per token: over all."""
    router_bias: bool = False
    """Add biases to scores to choose experts, not to weight them; they are not trained. `sigmoid` only."""
    router_groups: int = key(0, at_least=0, at_most=2**16)
    """Groups of experts, of which a token uses `router_groups_per_token`."""
    router_groups_per_token: int = key(0, at_least=0, at_most=2**16)
    """Groups per token, by the sums of their two best scores. Half of `experts_per_token`."""
    router_scaling_factor: float = key(1.0, above=0)
    """Multiplies the weights of the chosen experts."""
    dense_layers: list[int] = key(factory=list, at_least=0)
    """Layers, counted from 0, without experts; their width is `ffn_hidden_size`."""
    expert_ffn_hidden_size: int = key(0, at_least=0, at_most=MOST_WIDTH)
    """Width of one expert; 0: `ffn_hidden_size`."""
    shared_expert_ffn_hidden_size: int = key(0, at_least=0, at_most=MOST_WIDTH)
    """Width of the expert that every token uses; 0: none."""
    shared_expert_gate: bool = False
    """A learned gate scales the shared expert's output."""
    router_balancing: str = key("seq_aux_loss", choices=("seq_aux_loss", "aux_loss", "global_aux_loss", "none"))
    """Load balancing over a sequence (`seq_aux_loss`), a rank's microbatch (`aux_loss`), all data-parallel ranks
    (`global_aux_loss`), or `none`."""
    router_aux_loss: float = key(0.01, at_least=0)
    """Weight of the load-balancing loss, relative to the mean loss of a token."""
    router_z_loss: float = key(0.0, at_least=0)
    """Weight of the z-loss (ST-MoE, arXiv 2202.08906), relative to the mean loss of a token."""

    @property
    def expert_width(self) -> int:
        """Width of one expert."""
        return self.expert_ffn_hidden_size or self.ffn_hidden_size

    @property
    def softmax_over_all_experts(self) -> bool:
        """True if the router's softmax covers all experts: over a single one it would be 1, without a gradient."""
        over_all = not self.router_renormalise or self.experts_per_token == 1
        return over_all and self.router_score_function == "softmax"

    @property
    def balances_microbatches(self) -> bool:
        """True if expert loads are balanced over a microbatch of ranks; losses depend on the layout then."""
        return bool(self.num_experts) and self.router_balancing in ("aux_loss", "global_aux_loss")

    def has_experts(self, layer: int) -> bool:
        """True if a layer, counted from 0, is a mixture of experts."""
        return bool(self.num_experts) and layer not in self.dense_layers

    def experts(self) -> "Experts":
        """Return the block of a layer with experts."""
        return Experts(
            self.hidden_size,
            self.num_experts,
            self.experts_per_token,
            Mlp(self.hidden_size, self.expert_width, self.is_gated, self.bias, self.activation_clamp > 0),
            Mlp(self.hidden_size, self.shared_expert_ffn_hidden_size, self.is_gated),
            shared_gate=self.shared_expert_gate,
            router_bias=self.router_bias,
            width_key="expert_ffn_hidden_size" if self.expert_ffn_hidden_size else "ffn_hidden_size of an expert,",
        )

    def expert_faults(self, prefix: str) -> Iterator[Fault]:
        """Yield invalid combinations of keys; `prefix`: key of the spec."""
        if not self.num_experts:
            for name in changed_fields(self):
                if name.startswith(("expert", "shared_expert", "router_")):
                    yield Fault(f"{prefix}.{name}", f"requires experts, but {prefix}.num_experts is 0. Remove it")
            return
        if len(set(self.dense_layers)) >= self.num_layers:
            yield Fault(f"{prefix}.dense_layers", f"names all layers. Set {prefix}.num_experts=0 instead")
        if not 1 <= self.experts_per_token <= self.num_experts:
            yield Fault(
                f"{prefix}.experts_per_token",
                f"must be from 1 to {prefix}.num_experts {self.num_experts}, is {self.experts_per_token}",
            )
        if self.bias and self.shared_expert_ffn_hidden_size:
            yield Fault(
                f"{prefix}.bias", f"is not supported with {prefix}.shared_expert_ffn_hidden_size. Set it to false"
            )
        if self.shared_expert_gate and not self.shared_expert_ffn_hidden_size:
            yield Fault(
                f"{prefix}.shared_expert_gate",
                f"there is no shared expert to scale, {prefix}.shared_expert_ffn_hidden_size is 0: set it, or the gate "
                "to false",
            )
        yield from self._router_faults(prefix)

    def _router_faults(self, prefix: str) -> Iterator[Fault]:
        groups, chosen, experts = self.router_groups, self.router_groups_per_token, self.num_experts
        if self.router_score_function != "sigmoid":
            for name in ("router_bias", "router_groups"):
                if getattr(self, name):
                    yield Fault(f"{prefix}.{name}", f"requires {prefix}.router_score_function=sigmoid")
        elif not self.router_renormalise:
            yield Fault(f"{prefix}.router_renormalise", "must be true with sigmoid scores, which are divided by a sum")
        if bool(groups) != bool(chosen):
            yield Fault(
                f"{prefix}.router_groups",
                f"is {groups}, and {prefix}.router_groups_per_token is {chosen}. Set both, or neither",
            )
        elif groups and (experts % groups or not chosen < groups or experts // groups < 2):
            yield Fault(
                f"{prefix}.router_groups",
                f"must be above router_groups_per_token {chosen} and divide num_experts {experts} into groups of at "
                f"least 2, is {groups}",
            )
        elif groups and (self.experts_per_token != 2 * chosen):
            yield Fault(
                f"{prefix}.router_groups_per_token",
                f"must be half of experts_per_token {self.experts_per_token}, is {chosen}: Megatron-Core compares "
                f"groups by their experts_per_token / router_groups_per_token best scores, published models by two",
            )


@dataclass(frozen=True)
class Experts(Block):
    """A router, experts of which each token uses some, and a shared expert that every token uses."""

    kind = "experts"

    hidden: int
    number: int
    per_token: int
    expert: Mlp
    shared: Mlp
    """Width 0: none."""
    shared_gate: bool = False
    router_bias: bool = False
    """True with a buffer of biases, which are no parameters."""
    width_key: str = field(default="expert_ffn_hidden_size", compare=False)
    """Key of an expert's width."""

    def parameters(self) -> tuple[int, int]:
        """See `Block`. Routers and gates are on every rank."""
        biases = self.number if self.expert.bias else 0
        return self.shared.parameters()[0], self.hidden * (self.number + self.shared_gate) + biases

    def expert_parameters(self, ep: int, etp: int) -> int:
        """Return the parameters of experts on one rank: split over ep ranks, and each over etp, which is 1 with
        biases."""
        return self.number // ep * sum(self.expert.parameters()) // etp

    def matrices(self, tp: int, ep: int, etp: int) -> int:
        """See `Block`. The router is never in fp8."""
        return self.shared.matrices(tp, 1, 1) + self.number // ep * self.expert.matrices(etp, 1, 1)

    def matmuls(self, layer: str, tokens: float, pairs: float | None = None) -> Iterator[Matmul]:
        """Yield the matmuls of router, `per_token` experts (named as the first one), and shared expert."""
        block = f"{layer}.mlp"
        yield Matmul(f"{block}.router.weight", 2 * tokens * self.hidden * self.number, in_layer=True)
        yield from self.expert.two_matmuls(f"{block}.experts.local_experts.0", tokens * self.per_token)
        if self.shared.width:
            yield from self.shared.two_matmuls(f"{block}.shared_experts", tokens)
            if self.shared_gate:
                yield Matmul(f"{block}.shared_experts.gate_weight", 2 * tokens * self.hidden, in_layer=True)

    def linears(self, layer: str, number: int) -> Iterator[Linear]:
        """Yield the linear layers of the experts, where gate and up are one projection, and of the shared expert."""
        block, halves = f"{layer}.mlp", (self.expert.width,) * (2 if self.expert.gated else 1)
        first = "gate_up_proj" if self.expert.gated else "up_proj"
        up = Linear(f"{block}.experts.linear_fc1", self.hidden, ((first, self.expert.up),), sections=((first, halves),))
        down = Linear(f"{block}.experts.linear_fc2", self.expert.width, (("down_proj", self.hidden),), column=False)
        yield replace(up, layer=number, experts=self.number)
        yield replace(down, layer=number, experts=self.number)
        for linear in self.shared.linears(layer, number) if self.shared.width else ():
            yield replace(linear, name=linear.name.replace(".mlp.", ".mlp.shared_experts."))

    def kept(self, share: Share) -> tuple[int, int]:
        """Return the bytes of expert rows, router and shared expert.

        With k experts per token of width f, E experts and balanced routing, a rank's experts see k rows for each token
        of the etp ranks that share an expert. A row keeps its input h and 6 f / etp (3 f without a gate or with a fused
        one, 8 f with a clamped one): one f more than a dense layer, the product with the router's probability, which a
        fused kernel does not keep. If ranks share an
        expert, this rank's rows are also there before they are gathered. The router keeps 3 E numbers in fp32, the
        shared expert as much as a dense block.
        """
        size, gated, width = share.size, self.expert.gated, self.expert.width
        rows = share.local_tokens * self.per_token * share.etp
        halves = (3 if share.fused else 6) + 2 * self.expert.clamped if gated else 3
        routed = rows * (self.hidden + halves * width // share.etp) * size
        routed += rows // share.etp * self.hidden * size if share.etp > 1 else 0
        shared = share.tokens * ((3 if share.fused else 5) if gated else 2) * self.shared.width * size // share.tp
        return 0, routed + shared + share.local_tokens * 3 * self.number * 4

    def work(self, share: Share) -> int:
        """Return the gradients of expert rows before and after the dispatch, plus those of the activation function's
        output (3 h + 2 f / etp)."""
        rows = share.local_tokens * self.per_token * share.etp
        return rows * (3 * self.hidden + 2 * (self.expert.width // share.etp)) * share.size

    def widths(self) -> dict[str, Width]:
        return {self.width_key: (self.expert.width, "etp"), "shared_expert_ffn_hidden_size": (self.shared.width, "tp")}

    def needs_torch(self, cp: int) -> str:
        return "llm.bias with experts requires torch's layers" if self.expert.bias else ""

    def layout_faults(self, layout: Any, key: str) -> Iterator[Fault]:
        yield from tp_faults(layout.tp, key, shared_expert_ffn_hidden_size=self.shared.width)
        if self.expert.bias and layout.etp > 1:
            yield Fault(
                f"{key}.layout.etp", f"is not supported with biases of experts ({key}.llm.bias), is {layout.etp}. Use 1"
            )
        number, width = self.number, self.expert.width
        if number % layout.ep:
            yield Fault(
                f"{key}.layout.ep",
                f"ep {layout.ep} does not divide num_experts {number}: use a divisor of {number}, or change "
                "num_experts",
            )
        if width % layout.etp:
            yield Fault(
                f"{key}.layout.etp",
                f"etp {layout.etp} does not divide the width {width} of an expert: use a divisor of {width}, or change "
                f"{key}.llm.expert_ffn_hidden_size",
            )
        ranks = layout.tp * layout.cp * layout.dp
        if ranks % (layout.ep * layout.etp):
            axis = "ep" if layout.ep > 1 else "etp"
            yield Fault(
                f"{key}.layout.{axis}",
                f"ep {layout.ep} x etp {layout.etp} does not divide the {plural(ranks, 'rank')} of a stage (tp "
                f"{layout.tp} x cp {layout.cp} x dp {layout.dp}): experts are dealt to these; use a divisor of "
                f"{ranks}, or raise dp",
            )
        if layout.tp > 1 and not layout.sp:
            yield Fault(
                f"{key}.layout.sp",
                f"experts with tp {layout.tp} need sequence parallel, so that each rank routes its own tokens: set sp "
                "to true, or tp to 1",
            )

    def rules(self, ours: str, theirs: str, names: Mapping[str, str]) -> Iterator[Rule]:
        """See `Block`. Names: `router`, `router_bias` (with its last part), `shared_gate`, the prefixes `shared` and
        `expert` (with its number as `{}`), and behind these `gate`, `up` and `down`. Or, instead of `expert`, the
        stacks of all experts `stacked_up` (gate and up) and `stacked_down`, with their last parts, and with `_bias`
        behind these; `interleaved_up`: with gate and up in turns."""
        block = f"{ours}mlp."
        router = [same(f"{block}router.weight", f"{theirs}{names['router']}.weight", self.number)]
        yield from with_biases(router) if self.expert.bias else router
        if self.router_bias:
            # Rounded, it would choose other experts.
            yield Rule(f"{block}router.expert_bias", (Rows(f"{theirs}{names['router_bias']}", self.number),), fp32=True)
        if self.shared.width:
            yield from self.shared.linear_rules(f"{block}shared_experts.", theirs + names["shared"], names)
        if self.shared_gate:
            yield same(f"{block}shared_experts.gate_weight", f"{theirs}{names['shared_gate']}.weight", 1)
        for expert in range(self.number):
            prefix = f"{block}experts.local_experts.{expert}."
            if "expert" in names:
                linears = self.expert.linear_rules(prefix, theirs + names["expert"].format(expert), names)
                yield from with_biases(linears) if self.expert.bias else linears
            else:
                yield from self._stacked(expert, prefix, theirs, names)

    def _stacked(self, expert: int, ours: str, theirs: str, names: Mapping[str, str]) -> Iterator[Rule]:
        """Yield the rules of an expert whose weights are in stacks of all experts."""
        step = 2 if "interleaved_up" in names else 1
        up, down = names["interleaved_up" if step == 2 else "stacked_up"], names["stacked_down"]
        linears = (("1", up, self.expert.up, self.hidden, step), ("2", down, self.hidden, self.expert.width, 1))
        for linear, name, height, width, step in linears:
            stacks = {"weight": ("", (self.number, height, width)), "bias": ("_bias", (self.number, height))}
            for part, (end, stack) in stacks.items() if self.expert.bias else [("weight", stacks["weight"])]:
                firsts = range(expert * height, expert * height + step)
                rows = [Rows(f"{theirs}{name}{end}", height // step, first, stack=stack, step=step) for first in firsts]
                yield Rule(f"{ours}linear_fc{linear}.{part}", tuple(rows))
