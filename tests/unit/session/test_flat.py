"""Column: appended and cut rows, and views that never change."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.session.flat import Column


def rows(*values):
    return np.array(values, np.int32)


op = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 40)),
    st.tuples(st.just("cut"), st.integers(0, 60)),
    st.tuples(st.just("view"), st.integers(0, 60)),
    st.tuples(st.just("copy"), st.integers(0, 60)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(op, max_size=25))
def test_column_equals_a_list_and_its_views_stay_as_they_were(operations):
    column, model, seen, count = Column(), [], [], 0
    for name, number in operations:
        if name == "append":
            new = list(range(count, count + number))
            count += number
            column.append(np.array(new, np.int32))
            model += new
        elif name == "cut":
            size = min(number, len(model))
            column.cut(size)
            model = model[:size]
        elif model and name == "view":
            start = number % len(model)
            view = column.view(start, len(model))
            seen.append((view, model[start:]))
        elif model:
            half = number % len(model)
            pieces = [(half, len(model)), (0, half)]
            assert column.copy(pieces).tolist() == [*model[half:], *model[:half]]
            assert column.copy([(0, len(model))]).tolist() == model
        assert len(column) == len(model)
        if model:
            assert column.rows(0, len(model)).tolist() == model
    for view, was in seen:
        assert view.tolist() == was
        assert not view.flags.writeable


def test_column_view_shows_the_buffer_itself():
    column = Column()
    column.append(rows(*range(99)))
    column.append(rows(99))
    whole = column.view(0, 100)
    column.append(rows(1, 2, 3))
    assert np.shares_memory(whole, column.view(0, 103)), "room was left, so nothing moved"


def test_column_copy_belongs_to_the_caller():
    column = Column()
    column.append(rows(1, 2, 3))
    copied = column.copy([(0, 3)])
    copied[0] = 9
    assert column.rows(0, 3).tolist() == [1, 2, 3]


def test_column_keeps_rows_of_any_shape():
    column = Column()
    first, second = np.zeros((2, 3, 4), np.uint8), np.ones((5, 3, 4), np.uint8)
    column.append(first)
    column.append(second)
    assert column.view(0, 7).shape == (7, 3, 4)
    assert column.view(0, 7).dtype == np.uint8
    assert column.rows(2, 7).all()


def test_column_holds_an_eighth_more_than_its_rows_at_most():
    column = Column()
    for _ in range(500):
        column.append(np.zeros(97, np.int32))
        column.view(0, len(column))
    assert column.nbytes <= 4 * len(column) * 9 / 8
