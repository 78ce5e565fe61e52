"""What a rank writes into its box, the others read; no file stays behind; and without room there are no boxes."""

from pathlib import Path

import torch.distributed as dist

from tests.distributed.pool import run_on_ranks


def boxes_on_rank(rank: int, world_size: int, num_bytes: int):
    """What this rank reads in every box, twice; None without boxes."""
    from megarlhf.parallel.shared_memory import open_boxes

    boxes = open_boxes(dist.group.WORLD, num_bytes)
    if boxes is None:
        return None
    found = []
    for number in range(2):
        boxes[rank].fill_(10 * number + rank + 1)
        dist.barrier()
        found.append([box.unique().tolist() for box in boxes])
        dist.barrier()
    return found, [len(box) for box in boxes]


def test_all_read_what_each_has_written_and_no_file_stays():
    before = set(Path("/dev/shm").glob("megarlhf-*"))
    for found, sizes in run_on_ranks(2, boxes_on_rank, 4096):
        assert found == [[[1], [2]], [[11], [12]]] and sizes == [4096, 4096]
    assert set(Path("/dev/shm").glob("megarlhf-*")) - before == set()


def test_without_room_no_rank_has_boxes():
    assert run_on_ranks(2, boxes_on_rank, 2**60) == [None, None]


def boxes_where_one_cannot_map(rank: int, world_size: int):
    """Without boxes, as the last rank is refused its mapping."""
    from unittest.mock import patch

    import torch

    from megarlhf.parallel.shared_memory import open_boxes

    refused = RuntimeError("unable to mmap") if rank == world_size - 1 else None
    with patch.object(torch, "from_file", side_effect=refused, wraps=torch.from_file):
        return open_boxes(dist.group.WORLD, 4096)


def test_where_one_rank_cannot_map_none_has_boxes_and_none_waits():
    assert run_on_ranks(2, boxes_where_one_cannot_map) == [None, None]
