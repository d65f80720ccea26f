"""Audits as rows of text."""

from __future__ import annotations

from typing import Any

from lorabatch.engine.adapter.report import ACCOUNT_COLUMNS, AUDIT_COLUMNS, account_rows, audit_rows


def test_one_row_tells_verdict_size_and_remarks(plain: Any, train: Any, llama: Any) -> None:
    (plain.folder / "tokenizer.json").write_text("{}")
    dora = train(llama, use_dora=True).audit()
    broken = train(llama, r=3)
    broken.configure(r=5, target_modules=["q_proj", "wte"])
    first, second, third = audit_rows([plain.audit(), dora, broken.audit()])
    assert first == ("zoo", "exact", "2", "8", "0.0", "brings its own tokenizer or chat template")
    assert second[:4] == ("zoo", "exact-by-merge", "2", "2")
    assert second[5].startswith("adapter 'zoo': use_dora=True: ")
    assert third[:2] == ("zoo", "refused")
    assert "has rank 3, expected 5" in third[5]
    assert "wte, which this base does not have" in third[5]
    assert len(AUDIT_COLUMNS) == len(first)


def test_every_key_and_tensor_has_a_row(plain: Any) -> None:
    audit = plain.audit()
    rows = account_rows(audit)
    assert all(len(row) == len(ACCOUNT_COLUMNS) for row in rows)
    assert ("key", "lora_dropout", "irrelevant: only acts during training") in rows
    assert sum(row[0] == "tensor" for row in rows) == len(plain.tensors())
    assert sum(row[0] == "key" for row in rows) == len(audit.key_uses)
