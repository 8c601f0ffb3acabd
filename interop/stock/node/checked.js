// The cases whose payloads are checked byte for byte by both sides (interop/proto/checked.proto).
const assert = require('assert/strict')
const grpc = require('@grpc/grpc-js')
const { Checked, TestService } = require('./protos')
const { content, firstMismatch } = require('./content')
const { withClient, unary, collect, refused, all, reader } = require('./call')

const SIZES = [0, 1, 1000, 20_000, 1 << 20, 8 << 20]
const GZIP = { 'grpc.default_compression_algorithm': 2 }

const asked = (seed, length, reply = 0, { count = 0, period = 0 } = {}) =>
  ({ seed, payload: content(seed, length, period), reply_seed: seed + 1000, reply_bytes: reply, count, period })

function right(reply, seed, length, received, period = 0) {
  assert.equal(reply.seed, seed)
  assert.equal(reply.payload.length, length)
  assert.equal(firstMismatch(seed, reply.payload, period), 0, `a byte of the ${length} is wrong`)
  assert.equal(reply.received_bytes, received)
  assert.equal(reply.first_mismatch, 0, `the server got a wrong byte in ${received}`)
}

async function bothWays(client, seed, length, reply, period = 0) {
  const got = await unary(client, 'Unary', asked(seed, length, reply, { period }))
  right(got.reply, seed + 1000, reply, length, period)
}

const checked = {
  async checked_unary(client) {
    for (const [seed, size] of SIZES.entries()) await bothWays(client, seed, size, size)
    // The server's own check: the last of 100 bytes is wrong.
    const spoiled = asked(1, 100)
    spoiled.payload[99] ^= 1
    assert.equal((await unary(client, 'Unary', spoiled)).reply.first_mismatch, 100)
  },
  async checked_client_streaming(client) {
    const reply = await collect(client, 'Collect', SIZES.map((size, seed) => asked(seed, size)))
    assert.equal(reply.received_bytes, SIZES.reduce((sum, size) => sum + size))
    assert.equal(reply.first_mismatch, 0)
  },
  async checked_server_streaming(client) {
    const replies = await all(client.Produce(asked(5, 10, 100_000, { count: 50 })))
    assert.equal(replies.length, 50)
    replies.forEach((reply, number) => right(reply, 1005 + number, 100_000, 10))
  },
  async checked_ping_pong(client) {
    const call = client.Exchange()
    const next = reader(call)
    for (const [seed, size] of SIZES.entries()) {
      const reply = SIZES[SIZES.length - 1 - seed]
      call.write(asked(seed, size, reply))
      right(await next(), seed + 1000, reply, size)
    }
    call.end()
    assert.equal(await next(), undefined)
  },
  // The client ends its half first. The server must still send its replies.
  async checked_half_close(client) {
    const call = client.Exchange()
    for (let seed = 0; seed < 20; seed++) call.write(asked(seed, 1000, 300_000))
    call.end()
    const replies = await all(call)
    assert.equal(replies.length, 20)
    replies.forEach((reply, seed) => right(reply, seed + 1000, 300_000, 1000))
  },
  async checked_concurrent(client) {
    await Promise.all(Array.from({ length: 64 }, (_, seed) => bothWays(client, seed, 1000 * seed, 2000 * seed)))
  },
  async checked_status_details(client) {
    const message = 'not found: Größe ☺'
    // google.rpc.Status: code, message, and a detail of a type that does not exist.
    const text = Buffer.from(message)
    const detail = Buffer.concat([Buffer.from([0x0a, 1, 0x74, 0x12, 100]), content(3, 100)])
    const details = Buffer.concat([Buffer.from([0x08, 5, 0x12, text.length]), text, Buffer.from([0x1a, detail.length]), detail])
    const error = await refused(grpc.status.NOT_FOUND, unary(client, 'Fail', { code: 5, message, details }))
    assert.equal(error.details, message)
    for (const key of ['grpc-status-details-bin', 'x-checked-bin']) assert.deepEqual(error.metadata.get(key), [details], key)
  },
}

async function echoed(client, initial, trailing) {
  const sent = { 'x-grpc-test-echo-initial': initial, 'x-grpc-test-echo-trailing-bin': trailing }
  const got = await unary(client, 'UnaryCall', {}, sent)
  assert.deepEqual(got.initial.get('x-grpc-test-echo-initial'), [initial])
  assert.deepEqual(got.trailing.get('x-grpc-test-echo-trailing-bin'), [trailing])
}

const cases = {}
for (const [name, body] of Object.entries(checked)) cases[name] = flags => withClient(Checked, flags, body)
cases.checked_gzip = flags => withClient(Checked, flags, async client => {
  for (const [seed, size] of SIZES.entries()) await bothWays(client, seed, size, size, 100)
}, GZIP)
const everyByte = Buffer.from(Array.from({ length: 512 }, (_, at) => at % 256))
cases.checked_binary_metadata = flags => withClient(TestService, flags, client => echoed(client, 'a  b ~!', everyByte))
cases.checked_large_metadata = flags =>
  withClient(TestService, flags, client => echoed(client, '0123456789abcdef'.repeat(180), content(9, 2000)))

module.exports = cases
