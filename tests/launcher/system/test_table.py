"""Columns of a table are as wide as their widest cells, and no line ends in spaces."""

from hvdlite_launcher.system.table import table


def test_cells_stand_below_each_other_and_lines_end_with_their_last_letter():
    assert table([("PID", "AGE"), ("7", "0:00:01"), ("4242", "")]) == ["PID   AGE", "7     0:00:01", "4242"]
