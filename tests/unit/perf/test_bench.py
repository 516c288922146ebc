"""The bench's passes: the values of all of them belong to the same figures."""

import pytest

from perf.bench import Bench


class NoBrokers:
    """Counts how often the brokers of a pass are dropped."""

    def __init__(self) -> None:
        self.dropped = 0

    def drop_all(self) -> None:
        self.dropped += 1


def measure(bench: Bench, count: int) -> None:
    for number in bench.passes():
        bench.add("rate", "1/s", [100 * number + one for one in bench.repeat("rate", count)], 7.0)


@pytest.mark.parametrize(
    ("passes", "count", "values"),
    [(1, 3, [0, 1, 2]), (3, 3, [0, 1, 100, 101, 200, 201]), (3, 1, [0, 100, 200]), (3, 5, 9)],
)
def test_passes_add_to_the_same_figures(passes, count, values):
    brokers = NoBrokers()
    bench = Bench(brokers, lambda line: None, passes=passes)
    measure(bench, count)
    (figure,) = bench.figures
    assert figure.name == "rate" and figure.target == 7.0
    assert len(figure.values) == values if isinstance(values, int) else figure.values == values
    assert brokers.dropped == passes


def test_two_figures_of_one_name_are_refused():
    bench = Bench(NoBrokers(), lambda line: None)
    bench.add("rate", "1/s", [1.0])
    with pytest.raises(ValueError, match="two figures are named 'rate'"):
        bench.add("rate", "1/s", [2.0])


def test_progress_names_the_pass():
    lines = []
    bench = Bench(NoBrokers(), lines.append, passes=2)
    measure(bench, 1)
    assert [line.split(" s  ")[1] for line in lines] == ["rate: 1 of 1, pass 1 of 2", "rate: 1 of 1, pass 2 of 2"]
