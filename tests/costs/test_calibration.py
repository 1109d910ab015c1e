"""Efficiencies that made a profile are found again, and make other models' times."""

import dataclasses
import itertools
import math

import pytest
import torch
import zoo
from torch import nn

import baechi
from baechi.costs.calibration import calibrate
from baechi.costs.estimation import estimate
from baechi.records.device_kinds import Calibration, Efficiency, find
from baechi.traced.traced_model import Traced

# What the made-up device does, against the peaks of `cpu`.
TRUE = Calibration(
    "cpu",
    (
        Efficiency("matmul", "fp32", 0.42, 0.31, "made up"),
        Efficiency("convolution", "fp32", 0.23, 0.55, "made up"),
        Efficiency("elementwise", "fp32", 1.0, 3.7, "made up"),
        Efficiency("normalization", "fp32", 1.0, 0.11, "made up"),
        Efficiency("pooling", "fp32", 0.0021, 0.6, "made up"),
    ),
    launch_ns=7_100,
    host_launch_ns=4_200,
)


def convolutional(width: int = 16, batch: int = 8) -> Traced:
    torch.manual_seed(0)
    layers = []
    for channels, size in ((3, 3), (width, 1), (width, 3)):
        layers += [nn.Conv2d(channels, width, size), nn.BatchNorm2d(width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(32))
    x = torch.randn(batch, 3, 24, 24)
    model(x)
    return baechi.trace(model, (x,))


def chain(*widths: int) -> Traced:
    pairs = itertools.pairwise(widths)
    layers = [layer for a, b in pairs for layer in (nn.Linear(a, b), nn.ReLU(), nn.LayerNorm(b))]
    return baechi.trace(nn.Sequential(*layers), (torch.randn(256, widths[0], requires_grad=True),))


def measured(traced: Traced, true: Calibration = TRUE) -> baechi.Profile:
    """What `profile` would say on a device of these efficiencies."""
    made = estimate(traced, "cpu", calibration=true)
    return dataclasses.replace(made, source="measured", environment="made up")


def total(profile: baechi.Profile) -> int:
    return sum(cost.forward_ns + cost.backward_ns for cost in profile.costs)


def test_efficiencies_that_made_a_profile_are_found_again():
    traces = [convolutional(), chain(64, 256, 512, 8)]
    found = calibrate([(traced, measured(traced)) for traced in traces])
    kind, true = find("cpu").calibrated(found), find("cpu").calibrated(TRUE)
    assert abs(found.launch_ns - TRUE.launch_ns) <= 2
    assert found.host_launch_ns == TRUE.host_launch_ns
    for op_class, bound in (
        ("matmul", "compute"),
        ("convolution", "compute"),
        ("pooling", "compute"),
        ("elementwise", "memory"),
        ("normalization", "memory"),
    ):
        one = getattr(kind.efficiency(op_class, "fp32"), bound)
        other = getattr(true.efficiency(op_class, "fp32"), bound)
        assert math.isclose(one, other, rel_tol=0.01), (op_class, one, other)
    assert all(fit.after < 0.01 for fit in found.fits)
    assert all(fit.before > 0.05 for fit in found.fits if fit.op_class == "convolution")


def test_a_calibration_on_one_model_serves_another():
    known, other = convolutional(), convolutional(width=48, batch=4)
    found = calibrate([(known, measured(known))])
    real = total(measured(other))
    before = abs(total(estimate(other, "cpu")) - real) / real
    after = abs(total(estimate(other, "cpu", calibration=found)) - real) / real
    assert before > 0.3
    assert after < 0.02


def test_a_few_wild_measurements_move_nothing():
    traced = convolutional()
    profile = measured(traced)
    costs = list(profile.costs)
    # As if another program had run meanwhile: three forwards take ten times as long.
    busy = sorted(range(len(costs)), key=lambda i: costs[i].forward_ns)[2:-2:4][:3]
    for i in busy:
        costs[i] = dataclasses.replace(costs[i], forward_ns=10 * costs[i].forward_ns)
    wild = dataclasses.replace(profile, costs=tuple(costs))
    found = calibrate([(traced, wild)])
    estimated = estimate(traced, "cpu", calibration=found)
    assert len(busy) == 3
    assert abs(total(estimated) - total(profile)) < 0.05 * total(profile)


def test_a_class_that_no_profile_has_stays_as_in_the_table():
    found = calibrate([(chain(32, 64), measured(chain(32, 64)))])
    assert not [e for e in found.efficiencies if e.op_class in ("convolution", "attention")]
    kind = find("cpu").calibrated(found)
    assert kind.efficiency("convolution", "fp32") == find("cpu").efficiency("convolution", "fp32")


@pytest.mark.slow
def test_real_measurements_give_finite_efficiencies():
    model, args, kwargs = zoo.MODELS["resnet_eval"]()
    traced = baechi.trace(model, args, kwargs)
    profile = baechi.profile(traced, threads=1, progress=False)
    found = calibrate([(traced, profile)])
    for share in found.efficiencies:
        assert math.isfinite(share.compute)
        assert math.isfinite(share.memory)
        assert share.source == "fitted to 1 measured profile"
    assert found.environment == profile.environment
    assert found.launch_ns >= 0
    overall = found.fits[-1]
    assert overall.op_class == "all"
    assert sum(fit.n for fit in found.fits[:-1]) == overall.n


def test_calibrating_is_deterministic_and_its_value_is_saved_whole(tmp_path):
    traced = convolutional()
    one, other = (calibrate([(traced, measured(traced))]) for _ in range(2))
    assert one == other
    baechi.dump(one, tmp_path / "c.json")
    assert baechi.load(tmp_path / "c.json", Calibration) == one
    table = one.table().splitlines()
    assert table[0].split() == ["class", "dtype", "n", "median", "before", "worst", "median",
                                "after", "worst"]  # fmt: skip
    assert len(table) == 1 + len(one.fits)
    assert table[-1].startswith("all")


def test_what_cannot_be_fitted_is_refused():
    traced, other = chain(8, 16), chain(8, 24)
    profile = measured(traced)
    still = dataclasses.replace(profile, costs=tuple(baechi.OpCost(0) for _ in profile.costs))
    elsewhere = dataclasses.replace(measured(other), environment="2 threads")
    for pairs, said in (
        ([], "there is no profile"),
        ([(traced, estimate(traced, "cpu"))], "is computed, so it would be fitted to itself"),
        ([(other, profile)], "of another model"),
        ([(traced, profile), (other, elsewhere)], "profiles of different devices"),
        ([(traced, still)], "no operator that takes time"),
        ([(traced, None)], "pairs of a traced model and its measured profile"),
    ):
        with pytest.raises(baechi.InputError, match=said):
            calibrate(pairs)
    with pytest.raises(baechi.InputError, match="device kind 'abacus' is unknown"):
        calibrate([(traced, profile)], "abacus")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (("", (), 1), "kind of a calibration"),
        (("cpu", (), -1), "launch_ns of a calibration is -1"),
    ],
)
def test_a_wrong_calibration_is_refused(fields, said):
    with pytest.raises(baechi.InputError, match=said):
        Calibration(*fields)
