"""The FLOPs of `metrics.flops` are those of the products that forward and backward really run."""

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch

from mimo_train.estimate.flops import count, frozen_patterns
from mimo_train.estimate.matmuls import Media, encoder_matmuls, language_matmuls
from mimo_train.layout.run import resolve
from tests.dist.ranks import run_ranks
from tests.dist.runs import config

FROZEN = {
    "nothing": {},
    "encoder": {"images": ["encoder"]},
    "projector": {"images": ["projector"]},
    "images": {"images": ["encoder", "projector"]},
    "llm": {"language": ["llm"]},
    "encoder and llm": {"images": ["encoder"], "language": ["llm"]},
    "first layer and embedding": {
        "images": ["encoder", "projector"],
        "language": ["embedding.*", "decoder.layers.0.*"],
    },
    "patterns": {"images": ["*.mlp.*"], "language": ["*.self_attention.*"]},
}
SAMPLES, IMAGES = 3, 2


def test_every_matrix_product_is_counted_forward_and_backward(tmp_path):
    for recompute, own in (("none", "full"), ("selective", ""), ("full", "")):
        cfg = config(
            "vlm_digits",
            tmp_path,
            tmp_path,
            "placement.mode=shared",
            f"train.recompute={recompute}",
            f"modules.images.recompute={own}",
            "modules.language.llm.num_query_groups=2",
            "modules.language.llm.tie_embeddings=true",
        )
        ((counted, names),) = run_ranks(count_products, 1, cfg)
        for variant, flops in counted.items():
            if recompute == "full" and variant == "first layer and embedding":
                continue  # Megatron-Core recomputes, and trains, only layers whose input needs a gradient
            assert flops == pytest.approx(expected(cfg, FROZEN[variant]), rel=1e-12), f"{variant}, {recompute}, {own}"
        for name, products in products_of(cfg).items():
            assert {product.name for product in products} <= names[name]


def products_of(cfg):
    """The products of one sample and of one image, with attention counted over all pairs of tokens: the kernel that
    can be counted does not leave out what the causal mask hides."""
    from mimo_train.estimate.parameters import padded_vocab_size
    from mimo_train.inputs.datasets import tokenizer_of

    length, module = cfg.data.sequence_length, cfg.modules["images"]
    language = language_matmuls(cfg.language.llm, length, padded_vocab_size(tokenizer_of(cfg).vocab_size))
    whole = 2 * length / (length + 1)
    size = module.encoder.image_size
    tokens = module.encoder.inner_tokens(size, size, module.projector.merge)
    image = Media(tokens - module.encoder.class_token, tokens, tokens**2)
    return {
        "images": encoder_matmuls("images", module.encoder, module.projector, cfg.language.llm.hidden_size, image),
        "language": [replace(product, attention=product.attention * whole) for product in language],
    }


def expected(cfg, freeze) -> float:
    products = products_of(cfg)
    frozen = {name: frozen_patterns(replace(cfg.modules[name], freeze=freeze.get(name, [])), 1) for name in products}
    trained_images = not {"encoder", "projector"} <= set(freeze.get("images", []))
    images = count(products["images"], frozen["images"], upstream=False, recompute=cfg.recompute_of("images"))
    language = count(products["language"], frozen["language"], upstream=trained_images, recompute=cfg.train.recompute)
    return IMAGES * images.hardware + SAMPLES * language.hardware


def count_products(cfg):
    """Counts of one forward and backward pass by what is frozen, and the names of each module's parameters."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from mimo_train.inputs.datasets import tokenizer_of
    from mimo_train.models.build import build_model
    from mimo_train.models.parameters import modules_of
    from mimo_train.parallel import device as devices
    from mimo_train.parallel.groups import build_groups

    layout, tokenizer, device = resolve(cfg).layout, tokenizer_of(cfg), devices.install("cpu", 0)
    devices.init_process_group("cpu", 1.0)
    token = tokenizer.placeholder_id(cfg.modules["images"].encoder.placeholder)
    special = {"images": token}
    sizes = {"vocab_size": tokenizer.vocab_size, "special_token_ids": special, "device": device, "te": False}
    model = build_model(cfg, layout, build_groups(layout), **sizes)
    modules = {name: chunks[0].module for name, chunks in modules_of(model).items()}
    batch = make_batch(cfg, token)
    counted = {}
    for variant, freeze in FROZEN.items():
        for name, module in modules.items():
            frozen = frozen_patterns(replace(cfg.modules[name], freeze=freeze.get(name, [])), 1)
            for parameter_name, parameter in module.named_parameters():
                parameter.requires_grad_(not any(fnmatchcase(parameter_name, pattern) for pattern in frozen))
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            losses, _ = model[0](**batch)
            losses.sum().backward()
        counted[variant] = counter.get_total_flops()
    return counted, {name: {key for key, _ in module.named_parameters()} for name, module in modules.items()}


def make_batch(cfg, token):
    """`SAMPLES` samples, `IMAGES` images in the first of them."""
    from encoders.base import num_tokens

    module, length = cfg.modules["images"], cfg.data.sequence_length
    size = module.encoder.image_size
    rows = IMAGES * num_tokens(module.encoder, module.projector, size, size)
    ids = torch.zeros(SAMPLES, length, dtype=torch.int64)
    ids[0, :rows] = token
    assert rows <= length
    return {
        "input_ids": ids,
        "position_ids": torch.arange(length).expand(SAMPLES, length).contiguous(),
        "labels": torch.zeros(SAMPLES, length, dtype=torch.int64),
        "loss_mask": torch.ones(SAMPLES, length),
        "modality_inputs": {
            "images": {"images": {"pixels": torch.zeros(IMAGES, 3, size, size, dtype=torch.uint8)}},
        },
    }
