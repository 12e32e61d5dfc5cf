"""The door: a path -> LoadedModel. Knows which reader a path needs and how a checkpoint is identified; no tensor names."""

from __future__ import annotations

import dataclasses
import hashlib
import mmap
from dataclasses import dataclass
from pathlib import Path

from kernels.decoder import DecoderShape, DecoderWeights
from kernels.linear import DenseWeight, Weight
from spec.errors import ModelFileError
from spec.models.assemble import assemble
from spec.models.config import ModelConfig, fail
from spec.models.families import FAMILIES
from spec.models.gguf_config import read_gguf_config
from spec.models.gguf_file import GGUFFile
from spec.models.hf_config import read_hf_config, read_quantisation
from spec.models.quant_source import QuantisedSource
from spec.models.safetensors_file import PICKLES, SafetensorsFolder
from spec.models.source import Form, GGUFSource, Quantise, SafetensorsSource, WeightForm, check_finite

ROPE_FREQS = "rope_freqs.weight"
# Files up to this size are hashed whole (about 1 GB/s); of longer ones header, date and samples of every tensor are.
WHOLE_DIGEST_BYTES = 1 << 28
SAMPLE_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """One checkpoint, ready for a decoder. Dense tensors may be views of the mapped file: read-only, and the file must not be
    rewritten in place (replacing it by a rename is fine) while they live."""

    name: str
    architecture: str
    shape: DecoderShape
    weights: DecoderWeights
    context: int  # positions the rotary tables cover
    eos_ids: tuple[int, ...]  # every end token the model's own files declare, ascending
    digest: str  # hex; equal digests mean equal weights in equal form

    def trimmed(self, vocab_size: int) -> LoadedModel:
        """Cut padding rows: only the first `vocab_size` tokens (the tokenizer's) can be scored. ModelFileError if too few."""
        rows = self.shape.vocab_size
        if not 1 <= vocab_size <= rows:
            raise ModelFileError(f"{self.name}: vocabulary: the tokenizer has {vocab_size} tokens, the checkpoint {rows} rows")
        if vocab_size == rows:
            return self
        return dataclasses.replace(
            self,
            shape=dataclasses.replace(self.shape, vocab_size=vocab_size),
            weights=dataclasses.replace(self.weights, lm_head=_first_rows(self.weights.lm_head, vocab_size)),
            eos_ids=tuple(i for i in self.eos_ids if i < vocab_size),
            digest=hashlib.sha256(f"{self.digest} {vocab_size}".encode()).hexdigest(),
        )


def _first_rows(weight: Weight, rows: int) -> Weight:
    """The first `rows` outputs, as views."""
    bias = None if weight.bias is None else weight.bias[:rows]
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.values[:rows], bias)
    codes, scale, minimum = weight.codes[:rows], weight.scale[:rows], weight.minimum[:rows]
    return dataclasses.replace(weight, codes=codes, scale=scale, minimum=minimum, bias=bias)


def load_model(
    path: Path,
    *,
    weights: WeightForm = "native",
    context: int | None = None,
    quantise: Quantise | None = None,
    published: bool = False,
) -> LoadedModel:
    """Load a GGUF file or a safetensors folder. Raises ModelFileError (the file's fault) or ConfigError (`context`'s).

    weights: "native" keeps the file's block types (see spec.models.blocks) and float types; "float32" and "bfloat16"
    dequantise every matrix. quantise: with "native", dense matrices become blocks, 8 or 4 bits a weight (embedding and output
    matrix always 8). context: positions the rotary tables cover; None is what the checkpoint declares, at most 131072.
    published: the layers' matrices of quantised safetensors stay in their published form (`kernels.linear.formats`), which GPUs
    and the reference read; otherwise they take the forms that every kernel reads (`spec.models.host_form`).
    """
    path = Path(path)
    form = Form(weights, quantise, published)
    if path.is_dir():
        return _load_folder(path, form, context)
    if not path.exists():
        fail(path, "path", "no such file or folder")
    if path.suffix in PICKLES:
        fail(path, "file", "pickle checkpoints can run code and are refused; convert it to safetensors")
    if path.suffix == ".safetensors":
        fail(path, "path", "a lone .safetensors file has no config; pass the folder that also holds config.json")
    return _load_gguf(path, form, context)


def _load_gguf(path: Path, form: Form, context: int | None) -> LoadedModel:
    file = GGUFFile(path)
    config = read_gguf_config(file)
    source = GGUFSource(file, form, FAMILIES[config.architecture].gguf_rows_interleaved)
    divisors = None
    if source.has(ROPE_FREQS):
        divisors = source.vector(ROPE_FREQS, config.head_dim // 2)
        check_finite(source, ROPE_FREQS, divisors)
        if float(divisors.min()) <= 0:
            source.refuse(ROPE_FREQS, "frequency factors must be positive")
    shape, weights = assemble(config, source, config.context(context), divisors)
    spans = [(info.offset, info.nbytes) for info in file.tensors.values()]
    digest = hashlib.sha256(repr(form).encode())
    _hash_file(digest, path, file.buffer, file.header_bytes, spans)
    return _loaded(path.stem, config, shape, weights, digest.hexdigest())


def _load_folder(folder: Path, form: Form, context: int | None) -> LoadedModel:
    if not (folder / "config.json").is_file():
        fail(folder, "config.json", "missing; a model folder has config.json and .safetensors files")
    config = read_hf_config(folder)
    files = SafetensorsFolder(folder)
    quantisation = read_quantisation(folder)
    source = SafetensorsSource(files, form) if quantisation is None else QuantisedSource(files, form, quantisation)
    shape, weights = assemble(config, source, config.context(context), None)
    digest = hashlib.sha256(repr(form).encode())
    digest.update((folder / "config.json").read_bytes())
    for file in files.files:
        spans = [(entry.offset, entry.nbytes) for entry in file.tensors.values()]
        _hash_file(digest, file.path, file.buffer, file.header_bytes, spans)
    return _loaded(folder.resolve().name, config, shape, weights, digest.hexdigest())


def _loaded(name: str, config: ModelConfig, shape: DecoderShape, weights: DecoderWeights, digest: str) -> LoadedModel:
    """End tokens past the last row can never be chosen and are dropped."""
    eos_ids = tuple(i for i in config.eos_ids if i < shape.vocab_size)
    return LoadedModel(name, config.architecture, shape, weights, shape.max_position, eos_ids, digest)


def _hash_file(digest: hashlib._Hash, path: Path, buffer: mmap.mmap, header: int, spans: list[tuple[int, int]]) -> None:
    """Whole contents of a file of moderate size; of a large one header, date, and the ends and middle of every tensor."""
    with memoryview(buffer) as view:
        if len(view) <= WHOLE_DIGEST_BYTES:
            digest.update(view)
            return
        digest.update(f"{len(view)} {path.stat().st_mtime_ns}".encode())
        digest.update(view[:header])
        for offset, size in spans:
            for start in (0, size // 2, max(size - SAMPLE_BYTES, 0)):
                digest.update(view[offset + start : offset + min(start + SAMPLE_BYTES, size)])
