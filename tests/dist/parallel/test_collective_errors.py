"""What one rank finds ends all ranks, at the same place and with the same words."""

from tests.dist.ranks import run_ranks


def _outcomes() -> list[str]:
    import torch.distributed as dist

    from mimo_train.config.errors import PeersError, UserError
    from mimo_train.parallel.collectives import agreed

    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    for at_fault in ((), (1,), (1, 2), (0, 1, 2)):
        try:
            with agreed():
                if rank in at_fault:
                    raise UserError(f"found by rank {rank}")
            found.append("")
        except UserError as error:
            # The one that has found it is to print it, the others are not.
            assert isinstance(error, PeersError) == (rank != min(at_fault))
            found.append(str(error))
    dist.destroy_process_group()
    return found


def test_all_ranks_raise_what_the_first_one_has_found():
    assert run_ranks(_outcomes, 3) == [["", "found by rank 1", "found by rank 1", "found by rank 0"]] * 3
