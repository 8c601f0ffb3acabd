// The content of checked payloads (interop/proto/checked.proto).

function content(seed, length) {
  const bytes = Buffer.alloc(Math.ceil(length / 4) * 4)
  for (let k = 0; k * 4 < length; k++) bytes.writeUInt32LE((Math.imul(k, 2654435761) + seed) >>> 0, k * 4)
  return bytes.subarray(0, length)
}

// Offset of the first wrong byte, plus one; 0 if all are right.
function firstMismatch(seed, payload) {
  const expected = content(seed, payload.length)
  return expected.equals(payload) ? 0 : expected.findIndex((byte, at) => byte !== payload[at]) + 1
}

module.exports = { content, firstMismatch }
