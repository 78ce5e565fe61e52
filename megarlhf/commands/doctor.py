"""`megarlhf doctor`: what this machine, or a launch of several, has and lacks."""

from collections.abc import Sequence

from megarlhf.config.flags import Parser

SUMMARY = "tell what this machine and its ranks have: megarlhf doctor [--shared FOLDER], also under torchrun or srun"


def main(argv: Sequence[str]) -> int:
    """Prints what was found on the first rank; 1 when something would keep a run from working."""
    parser = Parser(prog="megarlhf doctor", description=SUMMARY.partition(":")[0])
    parser.add_argument("--shared", default="", metavar="FOLDER", help="check that all ranks see this folder (run.dir)")
    words = parser.parse_args(argv)
    from megarlhf import device
    from megarlhf.loop.diagnosis import launch, machine, told

    found = machine()
    if not any(one.is_problem for one in found):
        device.join_world()
        found += launch(words.shared)
    if device.is_first_rank():
        print(told(found))
    device.leave_world()
    return int(any(one.is_problem for one in found))
