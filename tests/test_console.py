"""What a terminal shows at the end of a run."""

from rich.console import Console

from flows.console import evaluation_table


def test_no_figure_of_the_closing_table_is_cut_at_eighty_columns(capsys):
    columns = ("greedy", "pass@1", "pass@8", "pass@64", "maj@8", "maj@64")
    rows = {"warm-start": dict.fromkeys(columns, (0.346, 0.31, 0.39))}
    Console(width=80).print(evaluation_table(rows, (1, 8, 64)))
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert all(column in shown for column in columns)
    assert shown.count("34.6") == shown.count("[31–39]") == len(columns)
