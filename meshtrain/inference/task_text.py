"""Text as tokens for tasks, by the conventions of lm-evaluation-harness and transformers.

Unlike the text of training data, a special token that is spelled in a text becomes that token, and
a text may begin with the token that begins documents.
"""

from collections.abc import Sequence

from meshtrain.data import chat_template
from meshtrain.data import tokenizer as tokenizers
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError


class TaskText:
    """Converts the texts of tasks to tokens, and generated tokens to text."""

    def __init__(self, tokenizer: Tokenizer, *, bos: bool | None = None):
        """`bos` says whether texts begin with the token that begins documents; None: as usual.

        Usual is what the run's documents began with, and of an imported model what transformers
        does. Raises ConfigError if there is no such token.
        """
        self._tokenizer = tokenizer
        self._model = None
        if tokenizer.kind == "huggingface":
            self._model, _ = tokenizers.read_model(tokenizer.file)
        if bos and tokenizer.bos is None:
            raise ConfigError(
                f"--bos: tokenizer {tokenizer.file or 'bytes'} has no begin-of-document token; "
                f"use --no-bos"
            )
        self._before = self._tokens_before(bos)
        self._first = tokenizer.bos if self._before else self._named_bos()

    def _tokens_before(self, bos: bool | None) -> list[int] | None:
        """Returns the tokens before a text; None: tokenizer.json says which are around it."""
        tokenizer = self._tokenizer
        is_of_run = tokenizer.file and tokenizers.is_of_prepared_data(tokenizer.file.parent)
        # As in transformers 5: add_bos_token of tokenizer_config.json has no effect.
        if bos is None and self._model is not None and not is_of_run:
            return None
        adds_bos = tokenizer.adds_bos if bos is None else bos
        return [tokenizer.bos] if adds_bos and tokenizer.bos is not None else []

    def _named_bos(self) -> int | None:
        """Returns the token that transformers takes as the one that begins documents.

        It guesses none: where a tokenizer_config.json names no bos_token, there is none.
        """
        tokenizer = self._tokenizer
        if self._model is None or tokenizer.file is None:
            return tokenizer.bos
        folder = tokenizer.file.parent
        if not (folder / chat_template.CONFIG).is_file():
            return tokenizer.bos
        name = chat_template.named_special_tokens(folder).get("bos_token")
        return None if name is None else self._model.token_to_id(name)

    @property
    def end(self) -> int | None:
        """The token that ends documents."""
        return self._tokenizer.eos

    @property
    def prefix(self) -> int:
        """The token before a text without context; raises ConfigError if there is none."""
        for token in (self._first, self._tokenizer.eos):
            if token is not None:
                return token
        raise ConfigError(
            f"tokenizer {self._tokenizer.file}: has no token that begins or ends documents, before "
            f"the first token of a text; name one as bos_token in a tokenizer_config.json next to "
            f"it"
        )

    def encode(self, text: str, *, special: bool | None = None) -> list[int]:
        """Returns the tokens of a text, with those around a text if `special`.

        None: with them, unless the text begins with the spelling of `prefix`.
        """
        if special is None:
            special = not text.startswith(self._tokenizer.spelling(self.prefix))
        if self._model is None:
            ids = self._tokenizer.encode(text).tolist()
        else:
            with tokenizers.reporting_faults(self._tokenizer.file, "fails"):
                own = special and self._before is None
                ids = self._model.encode(text, add_special_tokens=own).ids
        return [*self._before, *ids] if special and self._before else ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, without special ones."""
        return self._tokenizer.decode(tokens)

    def spelling(self, token: int) -> str:
        """Returns the text of a special token."""
        return self._tokenizer.spelling(token)
