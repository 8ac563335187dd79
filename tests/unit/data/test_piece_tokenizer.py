"""`slime_core.testing.models.piece_tokenizer`: whole pieces, one token each, and nothing lost on the way back."""

from slime_core.testing.models import piece_tokenizer, write_tokenizer


def test_a_piece_is_one_token_and_no_token_spans_two(tmp_path):
    made = piece_tokenizer(["<code>", "a+b", "ab"])
    assert made.encode("<code>a+bab\n").ids == [3, 4, 5, 6]
    assert made.encode("aab").tokens == ["a", "ab"]
    assert made.encode("<code").tokens == list("<code")
    assert made.encode("é").ids == [2]
    assert made.decode(made.encode("x = <code>a+b\n").ids) == "x = <code>a+b\n"
    assert made.get_vocab_size() == 3 + 3 + 96


def test_what_is_written_loads_as_a_hub_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, piece_tokenizer(["</s>."]), context_len=512)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.model_max_length) == (0, 1, 512)
    assert loaded("</s>.", add_special_tokens=False).input_ids == [3]
