"""What running a class of transformers on a few tokens tells of it."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from mimo_train.models.probe import Probe
from tests.dist.all_types.configs import tiny_config


@pytest.mark.parametrize(("longest", "joins"), [(1024, True), (64, False)])
def test_parameters_are_unused_if_no_text_of_the_run_is_long_enough(longest, joins):
    """DeepSeek V4 joins 128 tokens as one, and no gradient reaches its indexers."""
    config = tiny_config("deepseek_v4")
    assert max(config.compress_rates.values()) == 128
    unused = Probe(AutoModelForCausalLM.from_config(config), config.vocab_size, torch.float32, longest).unused()
    assert any(".indexer." in name for name in unused)
    assert all(".indexer." in name for name in unused) == joins, unused
