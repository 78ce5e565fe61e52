"""What a machine, and a launch of several, has to offer: packages, GPUs, network, and what ranks see of each other."""

import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from megarlhf import device
from megarlhf.device.gpus import describe_gpus
from megarlhf.device.packages import has_fused_weight_gradients, has_real_apex, package_violations
from megarlhf.device.transformer_engine import Machine, in_words
from megarlhf.device.versions import versions
from megarlhf.loop.agreement import disagreements
from megarlhf.parallel.rows import gather_objects

PROBE_BYTES = 64 * 2**20
"""Of the all-reduce that is timed."""


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    name: str
    value: str
    is_problem: bool = False


def machine() -> list[Finding]:
    """Packages, kernels, GPUs and network interfaces of this process's machine. Touches no GPU memory."""
    found = [Finding(name, version) for name, version in versions().items()]
    found.append(Finding("apex kernels (amp_C)", "yes" if has_real_apex() else "no: torch's are used"))
    found.append(Finding("fused weight gradients", "yes" if has_fused_weight_gradients() else "no"))
    found.append(Finding("Transformer Engine", in_words(Machine.here())))
    gpus = describe_gpus()
    found += [Finding("package", words, is_problem=True) for words in package_violations(has_gpu=bool(gpus))]
    found += [Finding(name, words) for name, words in gpus.items()]
    found += [] if gpus else [Finding("GPUs", f"none; {psutil.cpu_count()} CPU cores, gloo")]
    memory = psutil.virtual_memory()
    found.append(Finding("host memory", f"{memory.available / 2**30:.0f} of {memory.total / 2**30:.0f} GiB free"))
    return found + _interfaces()


def _interfaces() -> list[Finding]:
    """Addresses that other machines could reach, for NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME."""
    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        ips = [one.address for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6)]
        if ips and name in states and states[name].isup:
            speed = f", {states[name].speed} Mbit/s" if states[name].speed else ""
            found.append(Finding(f"interface {name}", f"{', '.join(ips)}{speed}"))
    return found


def launch(shared: str = "") -> list[Finding]:
    """What the ranks see of each other: hosts, versions, clocks, bandwidth, and a folder that all should share.

    Collective over the world; the same on every rank. `shared`: a folder, empty for none.
    """
    world = dist.get_world_size()
    everyone = gather_objects((socket.gethostname(), versions()))
    hosts = [host for host, _ in everyone]
    found = [Finding("ranks", f"{world} on {len(set(hosts))} machine(s): {', '.join(dict.fromkeys(hosts))}")]
    found += sameness(everyone)
    dist.barrier()
    clocks = gather_objects(time.time())
    spread = max(clocks) - min(clocks)
    found.append(Finding("clocks", f"within {spread:.1f} s of each other", is_problem=spread > 5))
    if world > 1:
        found.append(_bandwidth())
    return found + ([_shared_folder(Path(shared))] if shared else [])


def sameness(everyone: list[tuple[str, dict[str, str]]]) -> list[Finding]:
    """Whether ranks have the same versions and code, given (host, what it has) of each."""
    wrong = [Finding("versions", sentence, is_problem=True) for sentence in disagreements(everyone)]
    return wrong or [Finding("versions", f"the same on all ranks, code {everyone[0][1]['code']}")]


def _bandwidth() -> Finding:
    """Bus bandwidth of an all-reduce: 2 (n - 1) / n of the bytes cross each rank's link."""
    world = dist.get_world_size()
    tensor = torch.zeros(PROBE_BYTES // 4, device=device.current())
    seconds = []
    for _ in range(4):
        dist.barrier()
        device.synchronize()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        device.synchronize()
        seconds.append(time.perf_counter() - start)
    moved = 2 * (world - 1) / world * PROBE_BYTES
    slowest = max(gather_objects(min(seconds[1:])))  # the first one opens the connections
    return Finding(
        f"all-reduce of 64 MiB ({device.backend()})", f"{1e3 * slowest:.1f} ms, {moved / slowest / 1e9:.2f} GB/s a link"
    )


def _shared_folder(folder: Path) -> Finding:
    """Collective: a file that rank 0 writes is read by every rank."""
    token = gather_objects(secrets.token_hex(8))[0]
    probe, is_first, problem = folder / f".megarlhf_{token}", dist.get_rank() == 0, ""
    try:
        if is_first:
            folder.mkdir(parents=True, exist_ok=True)
            probe.write_text(token)
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
    dist.barrier()
    try:
        if not problem and probe.read_text() != token:
            problem = "other contents than rank 0 wrote"
    except OSError as error:
        problem = f"rank 0's file cannot be read: {error.strerror}"
    problems = gather_objects(problem)
    if is_first:
        probe.unlink(missing_ok=True)
    bad = [f"rank {rank}: {words}" for rank, words in enumerate(problems) if words]
    return Finding(f"folder {folder}", "; ".join(bad) or "seen by all ranks", is_problem=bool(bad))


def told(findings: list[Finding]) -> str:
    """The findings as text, a line each, problems marked."""
    width = max(len(one.name) for one in findings)
    return "\n".join(f"{'!' if one.is_problem else ' '} {one.name:{width}}  {one.value}" for one in findings)
