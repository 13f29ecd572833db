"""The order of messages to interleaved stages."""

from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from mimo_train.config import compose
from mimo_train.layout.ranks import first_chunk_order, lay_out, warm_up


def order_of_megatron_core(microbatches: int, stages: int, chunks: int) -> list[bool]:
    """Return the order of the first chunk of the first stage."""
    group = SimpleNamespace(size=lambda: stages, rank=lambda: 0)
    stage = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=chunks)
    total, _, ahead, _ = get_pp_rank_microbatches(microbatches, chunks, stages, p2p_communicator=stage)
    table = [chunk for _, chunk in get_schedule_table(microbatches, chunks, stages)]
    steps = [(True, chunk) for chunk in table[:ahead]]
    for step in range(total):
        steps += [(True, chunk) for chunk in table[step + ahead : step + ahead + 1]]
        steps.append((False, chunks - 1 - table[step]))
    return [forward for forward, chunk in steps if chunk == 0]


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3, 5])
def test_the_order_is_that_of_megatron_core_and_encoders_compute_far_enough_ahead(stages, chunks):
    sizes = [f"modules.language.layout.pp={stages}", f"modules.language.layout.vpp={chunks}"]
    layers = f"modules.language.llm.num_layers={stages * chunks}"
    layout = lay_out(compose.load("vlm_digits", ["layout=two_processes", *sizes, layers]))
    leads = []
    for groups in (1, 2, 3, 7):
        order = first_chunk_order(groups * stages, stages, chunks)
        assert order == order_of_megatron_core(groups * stages, stages, chunks)
        before = [sum(order[:place]) for place, forward in enumerate(order) if not forward]
        # With its warm-up of W, 1F1B has computed W + i + 1 microbatches before the gradient of microbatch i.
        leads.append(max(count - number - 1 for number, count in enumerate(before)))
    assert max(leads) == warm_up(layout, "images", 0)
