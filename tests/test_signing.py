"""Signatures with the job's key: what was changed, or signed with another key, is refused."""

import pickle

import pytest

from hvdlite.signing import TAG_BYTES, Signer


def test_a_signature_is_that_of_the_same_parts_and_key_alone():
    signer = Signer(b"key")
    tag = signer.sign("gather", 1, b"data")
    assert len(tag) == TAG_BYTES
    assert Signer(b"key").is_signed(tag, "gather", 1, b"data")
    for other in [("gather", 2, b"data"), ("gather", 1, b"date"), ("gather", 1), ("gather", 1, b"data", b"")]:
        assert not signer.is_signed(tag, *other)
    assert not Signer(b"other").is_signed(tag, "gather", 1, b"data")


@pytest.mark.parametrize(
    ("one", "other"),
    [(("ab", "c"), ("a", "bc")), (("1",), (1,)), ((b"1",), ("1",)), (("",), ()), ((12, 3), (1, 23))],
)
def test_parts_cannot_be_moved_into_each_other(one, other):
    assert Signer(b"key").sign(*one) != Signer(b"key").sign(*other)


def test_a_derived_key_says_nothing_about_others():
    signer = Signer(b"key")
    tags = {each.sign("x") for each in (signer, signer.derive("a"), signer.derive("b"), signer.derive("a").derive("b"))}
    assert len(tags) == 4


def test_a_key_is_neither_shown_nor_pickled():
    assert "key" not in repr(Signer(b"key"))
    with pytest.raises(TypeError, match="key"):
        pickle.dumps(Signer(b"key"))
