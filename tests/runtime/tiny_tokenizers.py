"""Tiny tokenizers of the kinds that published models use, built here so that tests depend on no file."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = (
    "Hello world, this is a test.",
    "In 2024, 12345 people paid $99.95 (3x) at 10:30.",
    "don't do that! I'm fine; they'll see",
    "日本語と中文 你好世界 안녕하세요",
    "emoji 🎉🎊 👩‍👩‍👧 and café ½ ² tabs\tand\n\nlines",
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level(*, digits: bool = False, bos: bool = False) -> Tokenizer:
    """As GPT-2, Qwen, Llama 3: every byte is a token, so any text can be said."""
    tokenizer = Tokenizer(models.BPE())
    parts = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens(["<think>", "emoji🎉"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    return tokenizer


def _byte_fallback_model() -> Tokenizer:
    pieces = ["▁", *"Helowrdtisa.,é好0123", "▁▁", "▁a", "lo", "▁t", "is"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(pieces)]
    merges = [("▁", "▁"), ("▁", "a"), ("l", "o"), ("▁", "t"), ("i", "s")]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens(["<think>"])
    return tokenizer


def llama_like() -> Tokenizer:
    """As Llama 2 and Mistral: spaces as ▁, unknown characters as bytes, one leading space dropped."""
    tokenizer = _byte_fallback_model()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace() -> Tokenizer:
    """Spaces as ▁ by pre-tokenizer and decoder, bytes by fallback."""
    tokenizer = _byte_fallback_model()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT: the decoder adds and removes spaces."""
    pieces = [
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[PAD]",
        "hello",
        "world",
        "##s",
        "##ing",
        "a",
        "b",
        "##a",
        ".",
        ",",
        "'",
        "do",
        "not",
        "n't",
        "##.",
        "!",
    ]
    tokenizer = Tokenizer(models.WordPiece(vocab={piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.add_special_tokens(pieces[:4])
    return tokenizer


KINDS = {"byte-level": byte_level, "llama-like": llama_like, "metaspace": metaspace, "word-piece": word_piece}
