"""The simulated network: the additional time of collectives between hosts.

Parallel, used at stage 8 by the engines of CPU devices. In: ``config.simulated_network`` and a collective. Out: a wait.
Consecutive ranks share a host. A collective whose ranks are on several hosts takes longer by the time of a ring of
these hosts (``links.py``), the same in every run: values, order and number of collectives do not depend on it. Ranks
of a host share its link: groups that communicate at the same time, such as one for each local rank, add their bytes.
"""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from blufunc import errors
from blufunc.config import NETWORK, config
from blufunc.core.ir import source
from blufunc.parallel.mesh.links import LinkSpec, exchange_seconds

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "B/s": 1.0, "MB/s": 1e6, "GB/s": 1e9}


class Network(NamedTuple):
    """Hosts, each of as many ranks as the others, and the link of each."""

    hosts: int
    link: LinkSpec


def wait(kind: str, nbytes: int, group: Sequence[int], size: int, **options: Any) -> None:
    """Sleep as long as a collective takes longer on the network that is configured.

    Args:
      kind, options: as of ``Engine.collective``.
      nbytes: of this rank's operand.
      group: the ranks, or the processes, that take part.
      size: of them all.
    Raises:
      ValueRangeError: the hosts do not divide the ranks.
    """
    if config.simulated_network and (
        seconds := delay(network(config.simulated_network), kind, nbytes, group, size, **options)
    ):
        time.sleep(seconds)


def delay(network: Network, kind: str, nbytes: int, group: Sequence[int], size: int, **options: Any) -> float:
    """Seconds that a collective takes longer; the arguments are those of ``wait``."""
    if size % network.hosts:
        raise errors.ValueRangeError(
            f"{size} ranks on {network.hosts} simulated hosts.",
            where=source.here(),
            why="each host has as many ranks as the others.",
            fix=f"bf.config.simulated_network = '2hosts,100us,10GB/s', with a number that divides {size}",
        )
    ranks = size // network.hosts
    of = [rank // ranks for rank in group]
    # groups on one link: all ranks take part, in groups of the form of this one
    sharing = ranks // max(collections.Counter(of).values())
    if kind == "permute":
        leaving = collections.Counter(of[a] for a, b in options["perm"] if of[a] != of[b])
        most = max(leaving.values(), default=0)
        return exchange_seconds(kind, nbytes * most * sharing, [2], [network.link]) if most else 0.0
    whole = sharing * (nbytes * len(group) if kind == "all_gather" else nbytes)
    return exchange_seconds(kind, whole, [len(set(of))], [network.link])


@functools.lru_cache(maxsize=16)
def network(text: str) -> Network:
    """The network of a value of the flag: ``2hosts,100us,10GB/s``."""
    found = NETWORK.fullmatch(text.replace(" ", ""))
    assert found is not None  # the flag is checked when it is set
    latency, bandwidth = float(found[2]) * _UNITS[found[3]], float(found[4]) * _UNITS[found[5]]
    return Network(int(found[1]), LinkSpec(bandwidth, latency))
