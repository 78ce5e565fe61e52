"""What a rank writes into its box, the others read; none has a name; and without room there are no boxes."""

import os

import torch.distributed as dist

from megarlhf.parallel import shared_memory
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


def test_all_read_what_each_has_written():
    for found, sizes in run_on_ranks(2, boxes_on_rank, 4096):
        assert found == [[[1], [2]], [[11], [12]]] and sizes == [4096, 4096]


def test_a_box_never_has_a_name_so_a_killed_process_leaves_none():
    with shared_memory._make_box(4096) as box:
        found = os.fstat(box.fileno())
        assert found.st_nlink == 0 and found.st_size == 4096 and found.st_dev == os.stat("/dev/shm").st_dev


def test_a_file_that_another_process_has_under_the_boxs_number_is_not_mapped():
    with shared_memory._make_box(4096) as box, shared_memory._make_box(4096) as other:
        place, stranger = shared_memory._place(box), shared_memory._place(other)
        assert [len(tensor) for tensor in shared_memory._mapped([place, stranger], 4096)] == [4096, 4096]
        assert shared_memory._mapped([place, stranger._replace(path=place.path)], 4096) is None
        assert shared_memory._mapped([place._replace(path="/proc/0/fd/3")], 4096) is None


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
