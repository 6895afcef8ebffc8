"""Golden blobs, read by the independent reader, against the restated format and the library's own values.

    check.py GOLDEN_DIR [GENERATED_DIR]

GENERATED_DIR holds what golden_write made with the library at hand: the same blobs, to be equal byte for
byte, and NAME.LAYER.{k,v}.f32, the tokens that kivi_dequantize returned.
"""

import os
import sys

try:
    import numpy as np
except ImportError:
    print("SKIP: numpy is not installed for", sys.executable)
    sys.exit(77)

import reader
from numerics import CANONICAL_NAN, fma, narrow, widen
from restate import borders, inputs, moment, quantize, read_cases, stored_rows

DTYPES = {"f32": 1, "f16": 2, "bf16": 3}


def expect(condition, what):
    if not condition:
        raise AssertionError(what)


def equal(a, b, what):
    a, b = np.asarray(a), np.asarray(b)
    expect(a.shape == b.shape, f"{what}: shape {a.shape} where {b.shape} is due")
    different = np.argwhere(a != b)
    if len(different):
        at = tuple(different[0])
        raise AssertionError(f"{what}: {len(different)} of {a.size} differ, at {at}: {a[at]}, due {b[at]}")


def load(*path):
    with open(os.path.join(*path), "rb") as file:
        return file.read()


def fnv1a(words):
    h = 0xCBF29CE484222325
    for word in words:
        for byte in int(word).to_bytes(8, "little"):
            h = (h ^ byte) * 0x100000001B3 % 2**64
    return h


def layout_id(sequence):
    words = [0, DTYPES[sequence.window_dtype], sequence.sink, len(sequence.layers)]
    for layer in sequence.layers:
        words += [layer.kv_heads, layer.key_dim, layer.value_dim]
        for spec in (layer.k, layer.v):
            fields = reader.Spec.RECORD.pack(*(getattr(spec, name) for name in spec.__dataclass_fields__))
            words += np.frombuffer(fields, "<u4").tolist()
    return fnv1a(words)


def check_spec(got, spec, what):
    if spec.bits == 16:
        due = (16, 0, 0, 0, 0.0, 0, int(spec.transform), 0)
    else:
        due = (spec.bits, {"channel": 1, "token": 2}[spec.axis], spec.group, int(spec.ratio > 0),
               float(np.float32(spec.ratio)), DTYPES[spec.param], int(spec.transform), int(spec.query_aware))
    expect(tuple(getattr(got, f) for f in got.__dataclass_fields__) == due, f"{what}: {got}, due {due}")


def check_table(data, case, index, got):
    """Encoder tables of a layer; the matrix follows from the case, they follow from the matrix."""
    layer = case.layers[index]
    moments = reader.read_moments(data)
    expect(moments.dim == layer.dims["k"] and len(moments.heads) == layer.kv_heads, "moments: shape")
    expect(moments.basis == int(layer.specs["k"].transform) and moments.queries == 0, "moments: basis")
    expect(got.tables == 1 and got.tables_crc == moments.tables_crc, "CRC of the encoder tables")
    for head, (matrix, order, weights) in enumerate(moments.heads):
        equal(matrix, moment(case, index, head), "moments: matrix")
        diagonal = matrix.diagonal().astype(np.float64)
        equal(order, np.argsort(-diagonal, kind="stable"), "moments: order")
        damped = matrix[np.ix_(order, order)].astype(np.float64) / diagonal.mean() + 0.1 * np.eye(moments.dim)
        upper = np.linalg.cholesky(np.linalg.inv(damped)).T
        due = np.triu(upper / upper.diagonal()[:, None], 1)
        expect(np.abs(weights - due).max() < 1e-6, "moments: weights")
    return [(order, weights) for _, order, weights in moments.heads]


def check_head(case, got, index, part, head, table, counts):
    layer = case.layers[index]
    spec = layer.specs[part]
    what = f"layer {index} {part} head {head}"
    bits, _ = stored_rows(inputs(case, index, part, head), spec.transform, case.dtype)
    rows = widen(bits, case.dtype)
    sink, border = min(case.sink, case.tokens), borders(case)[part]
    tail = max(border, sink)
    equal(got.sink, bits[:sink], what + " sink window")
    equal(got.tail, bits[tail:], what + " tail")
    due = rows.copy()
    if border and spec.bits == 16:
        equal(got.packed, bits[sink:border], what + " rows")
    elif border:
        codes, scale, low = quantize(rows[sink:border], spec, table)
        equal(got.scale, narrow(scale, spec.param), what + " scales")
        equal(got.min, narrow(low, spec.param), what + " mins")
        equal(got.packed, codes, what + " codes")
        nan = CANONICAL_NAN[spec.param]
        expect(((got.scale == nan) == (got.min == nan)).all(), what + ": a lone NaN")
        due[sink:border] = fma(codes.astype(np.float32), scale, low)
        counts["codes"] += codes.size
    expect(np.array_equal(got.rows, due, equal_nan=True), what + ": dequantised values")
    return due


def check_case(case, golden, generated, counts):
    name = case.name
    if not case.stored:
        golden = generated
    data = load(golden, name + ".kivi")
    counts["bytes"] += len(data)
    sequence = reader.read_sequence(data)
    due = (case.sink, case.recent, case.flush, case.unit, int(case.schedule == "published"), case.tokens)
    s = sequence
    got = (s.sink, s.recent, s.flush, s.unit, s.schedule, s.length)
    expect(got == due and s.window_dtype == case.dtype, f"header {got}, due {due}")
    expect(sequence.layout_id == layout_id(sequence), "layout id")
    expect(len(sequence.layers) == len(case.layers), "layers")
    if generated:
        expect(load(generated, name + ".kivi") == data, "the library writes other bytes than the golden blob")
    for index, (layer, got) in enumerate(zip(case.layers, sequence.layers)):
        expect((got.kv_heads, got.q_heads) == (layer.kv_heads, layer.q_heads), "heads")
        if not layer.kv_heads:
            continue
        expect((got.key_dim, got.value_dim) == (layer.dims["k"], layer.dims["v"]), "head dims")
        check_spec(got.k, layer.specs["k"], "spec of K")
        check_spec(got.v, layer.specs["v"], "spec of V")
        expect((got.key_border, got.value_border) == tuple(borders(case).values()), "borders")
        tables = [None] * layer.kv_heads
        if layer.specs["k"].query_aware:
            blob = load(golden, f"{name}.{index}.moments")
            counts["bytes"] += len(blob)
            tables = check_table(blob, case, index, got)
            if generated:
                expect(load(generated, f"{name}.{index}.moments") == blob, "the library writes other moments")
        else:
            expect(got.tables == 0 and got.tables_crc == 0, "encoder tables without moments")
        for part in "kv":
            for head in range(layer.kv_heads):
                table = tables[head] if part == "k" else None
                check_head(case, got.heads[part][head], index, part, head, table, counts)
            if generated:
                library = np.frombuffer(load(generated, f"{name}.{index}.{part}.f32"), "<f4")
                ours = got.dequantized(part).ravel()
                # Undoing a Hadamard may round differently; without one the bits are the format's.
                largest = np.abs(ours[np.isfinite(ours)]).max(initial=0)
                slack = 1e-6 * largest if getattr(got, part).transform else 0
                same = np.allclose(library, ours, rtol=0, atol=slack, equal_nan=True)
                expect(same, f"kivi_dequantize of layer {index} {part}")


def check_damage(data):
    """The reader itself refuses flipped bits, cuts and extensions."""
    refused = 0
    broken = [data[:cut] for cut in range(0, len(data), 97)] + [data + b"\0"]
    for bit in range(0, 8 * len(data), 331):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        broken.append(bytes(flipped))
    for blob in broken:
        try:
            reader.read_sequence(blob)
        except reader.Corrupt:
            refused += 1
    expect(refused == len(broken), f"reader took {len(broken) - refused} damaged blobs")


def main(golden, generated=None):
    counts = {"bytes": 0, "codes": 0}
    failed = 0
    cases = [case for case in read_cases() if case.stored or generated]
    for case in cases:
        try:
            check_case(case, golden, generated, counts)
        except (AssertionError, reader.Corrupt, OSError) as error:
            print(f"FAIL {case.name}: {error}")
            failed += 1
    check_damage(load(golden, cases[0].name + ".kivi"))
    right = len(cases) - failed
    print(f"{right} of {len(cases)} cases right: {counts['bytes']} bytes, {counts['codes']} codes")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
