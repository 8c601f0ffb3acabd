// The cases, by name. Each takes the program's flags, and throws an error if the server has a fault.
const assert = require('assert/strict')
const grpc = require('@grpc/grpc-js')
const { TestService, UnimplementedService } = require('./protos')
const { withClient, metadata, unary, collect, refused, all, reader } = require('./call')

const { INVALID_ARGUMENT, UNIMPLEMENTED, UNKNOWN, CANCELLED, DEADLINE_EXCEEDED } = grpc.status
const SIZES = [[27182, 31415], [8, 9], [1828, 2653], [45904, 58979]]
const CONCURRENT = 100
// WriteFlags.NoCompress, which grpc-js does not export.
const NO_COMPRESS = 2

const payload = size => ({ body: Buffer.alloc(size) })
const large = more => ({ response_size: 314159, payload: payload(271828), ...more })
const exchange = ([size, reply]) => ({ payload: payload(size), response_parameters: [{ size: reply }] })

function zerosCame(reply, size) {
  assert.equal(reply.payload.body.length, size)
  assert.ok(reply.payload.body.equals(Buffer.alloc(size)), 'the payload is not all zeros')
}

async function largeUnary(client, more) {
  const { reply } = await unary(client, 'UnaryCall', large(more))
  zerosCame(reply, 314159)
}

async function echoedStatus(client, message) {
  const status = { code: UNKNOWN, message }
  const error = await refused(UNKNOWN, unary(client, 'UnaryCall', { response_status: status }))
  assert.equal(error.details, message)
}

const official = {
  empty_unary: client => unary(client, 'EmptyCall', {}),
  // No cache is between client and server, so the calls have to succeed, but may have different content.
  async cacheable_unary(client) {
    for (let n = 0; n < 2; n++) await unary(client, 'CacheableUnaryCall', { payload: payload(1) }, { 'x-user-ip': '1.2.3.4' })
  },
  large_unary: client => largeUnary(client),
  async client_streaming(client) {
    const reply = await collect(client, 'StreamingInputCall', SIZES.map(([size]) => ({ payload: payload(size) })))
    assert.equal(reply.aggregated_payload_size, 74922)
  },
  async server_streaming(client) {
    const wanted = SIZES.map(([, size]) => size)
    const replies = await all(client.StreamingOutputCall({ response_parameters: wanted.map(size => ({ size })) }))
    assert.deepEqual(replies.map(it => it.payload.body.length), wanted)
  },
  async ping_pong(client) {
    const call = client.FullDuplexCall()
    const next = reader(call)
    for (const sizes of SIZES) {
      call.write(exchange(sizes))
      zerosCame(await next(), sizes[1])
    }
    call.end()
    assert.equal(await next(), undefined)
  },
  async empty_stream(client) {
    const call = client.FullDuplexCall()
    call.end()
    assert.deepEqual(await all(call), [])
  },
  async custom_metadata(client) {
    const sent = { 'x-grpc-test-echo-initial': 'test_initial_metadata_value', 'x-grpc-test-echo-trailing-bin': Buffer.from('ababab', 'hex') }
    const got = await unary(client, 'UnaryCall', large(), sent)
    const call = client.FullDuplexCall(metadata(sent))
    const streamed = {}
    call.on('metadata', it => { streamed.initial = it })
    call.on('status', it => { streamed.trailing = it.metadata })
    call.write(exchange([271828, 314159]))
    call.end()
    await all(call)
    for (const { initial, trailing } of [got, streamed]) {
      assert.deepEqual(initial.get('x-grpc-test-echo-initial'), [sent['x-grpc-test-echo-initial']])
      assert.deepEqual(trailing.get('x-grpc-test-echo-trailing-bin'), [sent['x-grpc-test-echo-trailing-bin']])
    }
  },
  async status_code_and_message(client) {
    const message = 'test status message'
    await echoedStatus(client, message)
    const call = client.FullDuplexCall()
    call.end({ response_status: { code: UNKNOWN, message } })
    const error = await refused(UNKNOWN, all(call))
    assert.equal(error.details, message)
  },
  special_status_message: client =>
    echoedStatus(client, '\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n'),
  unimplemented_method: client => refused(UNIMPLEMENTED, unary(client, 'UnimplementedCall', {})),
  async cancel_after_begin(client) {
    await refused(CANCELLED, new Promise((resolve, reject) => {
      const call = client.StreamingInputCall((error, reply) => (error ? reject(error) : resolve(reply)))
      setImmediate(() => call.cancel())
    }))
  },
  async cancel_after_first_response(client) {
    const call = client.FullDuplexCall()
    const next = reader(call)
    call.write(exchange(SIZES[0]))
    zerosCame(await next(), SIZES[0][1])
    call.cancel()
    await refused(CANCELLED, next())
  },
  async timeout_on_sleeping_server(client) {
    const call = client.FullDuplexCall({ deadline: Date.now() + 1 })
    call.on('error', () => {})
    call.write({ payload: payload(27182) })
    await refused(DEADLINE_EXCEEDED, all(call))
  },
  async concurrent_large_unary(client) {
    await Promise.all(Array.from({ length: CONCURRENT }, () => largeUnary(client)))
  },
}

// Makes large unary calls. A loop stands for each thread, and the loops share the iterations.
async function soak(flags, call) {
  let left = Number(flags.soak_iterations)
  const failures = []
  const loop = async () => {
    while (left-- > 0) await call().catch(error => failures.push(error))
  }
  await Promise.all(Array.from({ length: Number(flags.soak_num_threads) }, loop))
  assert.ok(failures.length <= Number(flags.soak_max_failures), `${failures.length} calls failed: ${failures[0]?.message}`)
}

const table = {}
for (const [name, body] of Object.entries(official)) table[name] = flags => withClient(TestService, flags, body)
table.unimplemented_service = flags =>
  withClient(UnimplementedService, flags, client => refused(UNIMPLEMENTED, unary(client, 'UnimplementedCall', {})))

// grpc-js compresses all calls of a client or none, so there are two clients.
const withBoth = body => flags => withClient(TestService, flags, plain =>
  withClient(TestService, flags, gzip => body(plain, gzip), { 'grpc.default_compression_algorithm': 2 }))

table.client_compressed_unary = withBoth(async (plain, gzip) => {
  await refused(INVALID_ARGUMENT, largeUnary(plain, { expect_compressed: { value: true } }))
  await largeUnary(gzip, { expect_compressed: { value: true } })
  await largeUnary(plain, { expect_compressed: { value: false } })
})
table.client_compressed_streaming = withBoth(async (plain, gzip) => {
  const compressed = { payload: payload(27182), expect_compressed: { value: true } }
  const uncompressed = { payload: payload(45904), expect_compressed: { value: false } }
  await refused(INVALID_ARGUMENT, collect(plain, 'StreamingInputCall', [compressed]))
  const reply = await collect(gzip, 'StreamingInputCall', [compressed, uncompressed], [0, NO_COMPRESS])
  assert.equal(reply.aggregated_payload_size, 73086)
})
table.rpc_soak = flags => withClient(TestService, flags, client => soak(flags, () => largeUnary(client)))
table.channel_soak = flags => soak(flags, () => withClient(TestService, flags, client => largeUnary(client)))
Object.assign(table, require('./checked'))

const hidden = 'grpc-js does not show whether a message came compressed'
const cannot = {
  server_compressed_unary: hidden,
  server_compressed_streaming: hidden,
  checked_zstd: 'grpc-js has no zstd',
}

module.exports = { table, cannot }
