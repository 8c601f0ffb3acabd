// The content of checked payloads (interop/proto/checked.proto).

function content(seed, length, period = 0) {
  const bytes = Buffer.alloc(Math.ceil(length / 4) * 4)
  for (let word = 0; word * 4 < length; word++) {
    const k = period ? word % period : word
    bytes.writeUInt32LE((Math.imul(k, 2654435761) + seed) >>> 0, word * 4)
  }
  return bytes.subarray(0, length)
}

// Returns the offset of the first wrong byte, plus one, or 0 if all bytes are right.
function firstMismatch(seed, payload, period = 0) {
  const expected = content(seed, payload.length, period)
  return expected.equals(payload) ? 0 : expected.findIndex((byte, at) => byte !== payload[at]) + 1
}

module.exports = { content, firstMismatch }
