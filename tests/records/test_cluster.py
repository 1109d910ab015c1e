"""Devices, links and clusters: what they refuse, and what they compute."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi import Cluster, Device, InputError, Link

LINK = Link(10, 10**9)
A, B = Device("a", 5), Device("b", 5)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Device("", 5), "device name is ''"),
        (lambda: Device("a", -5), "memory of device 'a' is -5"),
        (lambda: Device("a", "5 gigs"), "memory of device 'a' '5 gigs' cannot be read"),
        (lambda: Device("a", 5.0), "memory of device 'a' is 5.0, a float"),
        (lambda: Device("a", 5, 0.0), "speed of device 'a' is 0.0; it must be a positive"),
        (lambda: Device("a", 5, -1), "speed of device 'a' is -1"),
        (lambda: Device("a", 5, float("nan")), "speed of device 'a' is nan"),
        (lambda: Device("a", 5, float("inf")), "speed of device 'a' is inf"),
        (lambda: Device("a", 5, "fast"), "speed of device 'a' is 'fast'"),
        (lambda: Device("a", 5, True), "speed of device 'a' is True"),
        (lambda: Device("a", 5, kind=None), "kind of device 'a' is None, a NoneType; give a str"),
        (lambda: Device("a", 5, pool=3), "pool of device 'a' is 3"),
        (lambda: Device("a", 5, host=3), "host of device 'a' is 3"),
        (lambda: Device("a", 5, launches_ahead=1), "launches_ahead of device 'a' is 1"),
        (lambda: Link(-1, 1), "latency_ns of a link is -1"),
        (lambda: Link(0.5, 1), "latency_ns of a link is 0.5"),
        (lambda: Link(0, 1, -1), "overhead_ns of a link is -1"),
        (lambda: Link(0, 1, None), "overhead_ns of a link is None"),
        (lambda: Link(0, 0), "bytes_per_s of a link is 0; it must be a finite rate"),
        (lambda: Link(0, float("inf")), "bytes_per_s of a link is inf"),
        (lambda: Link(0, None), "give None instead of a Link"),
        (lambda: Cluster((), ()), "a cluster has no devices"),
        (lambda: Cluster((A, A), ((None,) * 2,) * 2), "two devices are named 'a'.*'a/a' and 'a/b'"),
        (
            lambda: Cluster((A, B), ((None, LINK),)),
            r"links has rows of \[2\] entries for 2 devices",
        ),
        (lambda: Cluster((A, B), ((None,), (LINK,))), r"links has rows of \[1, 1\] entries"),
        (lambda: Cluster((A,), ((7,),)), "a link is 7; give a baechi.Link or None"),
        (lambda: Cluster((A,), ((None,),), "many"), "ports is 'many'; it must be one of duplex"),
        (
            lambda: Cluster.connected([Device("a", 5, pool="p"), Device("b", 6, pool="p")], LINK),
            "'a' and 'b' share pool 'p' but claim 5 and 6 bytes",
        ),
        (lambda: Cluster.uniform(0, 5, LINK), "the number of devices is 0; it must be an integer"),
        (lambda: Cluster.uniform(True, 5, LINK), "the number of devices is True"),
        (lambda: Cluster.uniform(2, "many", LINK), "memory 'many' cannot be read"),
    ],
)
def test_what_is_wrong_is_named(make, match):
    with pytest.raises(InputError, match=match):
        make()


def test_memory_is_read_and_speed_is_a_float():
    device = Device("a", "1.5KiB", 2)
    assert (device.memory_bytes, device.speed, type(device.speed)) == (1536, 2.0, float)


@given(st.integers(0, 2**40), st.integers(0, 2**62), st.integers(1, 2**50))
def test_a_transfer_takes_the_latency_and_the_bytes_rounded_up(latency_ns, nbytes, rate):
    took = Link(latency_ns, rate, overhead_ns=5).transfer_ns(nbytes) - latency_ns
    assert (took - 1) * rate < nbytes * 10**9 <= took * rate


def test_a_float_rate_is_taken_as_whole_bytes():
    assert Link(0, 1e9 + 0.5) == Link(0, 10**9)


def test_a_uniform_cluster_joins_every_pair():
    cluster = Cluster.uniform(3, "1KiB", LINK, kind="k", speed=0.5)
    assert [d.name for d in cluster.devices] == ["device0", "device1", "device2"]
    assert cluster.devices[1] == Device("device1", 1024, 0.5, "k")
    assert cluster.links[0] == (None, LINK, LINK)
    assert cluster.ports == "duplex"


def test_where_all_links_are_equal_there_is_one():
    other = Link(10, 10**9, overhead_ns=1)
    assert Cluster.uniform(3, 5, LINK).uniform_link == LINK
    assert Cluster.uniform(1, 5, LINK).uniform_link is None
    equal = Cluster((A, B), ((other, LINK), (Link(10, 10**9), None)))
    assert equal.uniform_link == LINK
    assert Cluster((A, B), ((LINK, LINK), (other, LINK))).uniform_link is None
    assert Cluster((A, B), ((LINK, LINK), (None, LINK))).uniform_link is None
    assert Cluster((A, B), ((LINK, None), (LINK, LINK))).uniform_link is None


def test_a_cluster_is_a_value():
    cluster = Cluster.connected([A, B], LINK, ports="none")
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    assert hash(Cluster([A, B], [[None, LINK], [LINK, None]], "none")) == hash(cluster)
    with pytest.raises(AttributeError):
        cluster.ports = "shared"


def test_memory_may_be_an_integer_of_numpy_and_becomes_int():
    device = Device("a", np.int64(5))
    assert device == Device("a", 5)
    assert type(device.memory_bytes) is int
    assert type(Cluster.uniform(2, np.int32(7), LINK).devices[0].memory_bytes) is int
