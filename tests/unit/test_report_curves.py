"""Which curves share a picture, what is left of a long one, and how numbers are said."""

from __future__ import annotations

import math
import random

from monsess.report.curves import groups, numbers, thinned
from monsess.report.words import counted, duration_text, moment_text, number_text


def test_curves_of_one_name_share_a_picture():
    found = groups(["b/deep/loss", "global_step/sec", "eval/accuracy", "grad_norm", "lr", "loss", "eval/loss", "a/"])
    assert list(found) == ["loss", "accuracy", "lr", "a/", "grad_norm", "global_step/sec"]
    assert found["loss"] == ["loss", "eval/loss", "b/deep/loss"]
    assert list(groups(["layer10", "layer2", "layer"])) == ["layer", "layer2", "layer10"]


def test_a_long_curve_keeps_its_ends_and_its_spikes():
    generator = random.Random(3)
    points = [(step, float(step), generator.random()) for step in range(100_000)]
    points[31_234] = (31_234, 0.0, 50.0)
    points[77_777] = (77_777, 0.0, -50.0)
    points[500] = (500, 0.0, math.nan)
    curve = thinned("loss", points, most=1000)
    assert len(curve.points) <= 1002
    assert curve.count == 100_000
    assert {points[0], points[31_234], points[77_777], points[-1]} <= set(curve.points)
    assert curve.odd == (points[500],)
    steps = [point[0] for point in curve.points]
    assert steps == sorted(set(steps))


def test_a_short_curve_is_left_alone():
    points = [(1, 0.0, 1.0), (2, 1.0, math.inf), (3, 2.0, -math.inf), (4, 3.0, 2.0)]
    curve = thinned("loss", points)
    assert curve.points == (points[0], points[3])
    assert curve.odd == (points[1], points[2])
    many = thinned("loss", [(step, 0.0, math.nan) for step in range(10_000)])
    assert len(many.odd) == 200
    assert many.points == ()


def test_numbers():
    points = [(1, 0.0, 3.0), (2, 1.0, 1.0), (3, 2.0, math.nan)]
    (row,) = numbers({"loss": points, "nothing": []})
    assert (row.count, row.first, row.low, row.high) == (3, points[0], points[1], points[0])
    assert row.last is points[2]
    (row,) = numbers({"loss": points[2:]})
    assert (row.low, row.high) == (None, None)


def test_words():
    assert [number_text(v) for v in (0.1, 1e-9, 123456789.0, math.nan, math.inf, -math.inf)] == [
        *("0.1", "1e-09", "1.23457e+08", "NaN", "∞", "-∞")
    ]
    seconds = (0.0, 0.0009, 0.001, 0.99951, 9.995, 59.94, 59.96, 3599.6, 3600, 86399, 86400, 1e7)
    assert [duration_text(s) for s in seconds] == [
        *("0 ms", "<1 ms", "1 ms", "1.00 s", "10.0 s", "59.9 s", "1 min", "1 h", "1 h", "1 d", "1 d", "115 d 18 h")
    ]
    assert counted(1, "process", "processes") == "1 process"
    assert counted(1200, "process", "processes") == "1,200 processes"
    assert moment_text(1764467000.6) == "2025-11-30 01:43:20"
    assert moment_text(1e300) == "1e+300"
