"""What ``proxyd example two-sites`` prints."""

from __future__ import annotations

from typing import Any

from proxyd_client.examples import two_sites_table


def way(seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "iteration_median_seconds": seconds,
        "peak_activation_bytes": 2_000_000,
        "losses": [5.5, 4.25],
        "gradients_equal": True,
        "losses_equal": True,
        **more,
    }


def figures(**ways: dict[str, Any]) -> dict[str, Any]:
    return {"iterations": 8, "warmups": 2, "ways": {name.replace("_", "-"): one for name, one in ways.items()}}


def test_the_better_one_of_gloo_is_the_reference() -> None:
    shown = figures(gloo_cubic=way(3.0), gloo_bbr=way(2.0), run_time=way(1.0))
    assert two_sites_table.reference(shown["ways"]) == "gloo-bbr"
    assert [row[2] for row in two_sites_table.rows(shown)] == ["0.67x", "1.00x", "2.00x"]


def test_without_gloo_the_first_way_is() -> None:
    assert two_sites_table.reference(figures(one_f=way(2.0), run_time=way(1.0))["ways"]) == "one-f"


def test_a_difference_is_not_hidden() -> None:
    for wrong in ("gradients_equal", "losses_equal"):
        said = two_sites_table.text(figures(gloo_bbr=way(2.0), run_time=way(1.0, **{wrong: False})))
        assert "DIFFERENT" in said
        assert "report this" in said
        assert "bitwise equal" not in said
    assert "bitwise equal in all ways" in two_sites_table.text(figures(gloo_bbr=way(2.0), run_time=way(1.0)))


def test_a_schedule_without_predictions_says_why() -> None:
    report = {
        "waits_seconds": {"nothing has arrived": 0.25},
        "decision_p50_seconds": 4e-6,
        "decisions": 48,
        "predictions": 0,
        "prediction_error_seconds": 0.0,
        "fallback": "nobody predicts here",
    }
    said = two_sites_table.text(figures(gloo_bbr=way(2.0), run_time=way(1.0, **report)))
    assert "nobody predicts here" in said
    assert "0.250 s" in said
    assert "4 us" in said
