// gRPC's test service and the checked calls, served by grpc-js.
const { setTimeout: sleep } = require('timers/promises')
const grpc = require('@grpc/grpc-js')
const { TestService, Checked, limits } = require('./protos')
const tls = require('./tls')
const { content, firstMismatch } = require('./content')

const ECHO_INITIAL = 'x-grpc-test-echo-initial'
const ECHO_TRAILING = 'x-grpc-test-echo-trailing-bin'
const LARGEST = limits['grpc.max_send_message_length']

function failure(code, details, metadata) {
  return Object.assign(new Error(details), { code, details, metadata })
}

function zeros(size) {
  if (size < 0 || size > LARGEST) throw failure(grpc.status.INVALID_ARGUMENT, `a payload of ${size} bytes was asked for`)
  return { type: 'COMPRESSABLE', body: Buffer.alloc(size) }
}

// Sends the initial metadata back that the client sent to be echoed, and returns the trailing metadata.
function echoMetadata(call) {
  const [initial] = call.metadata.get(ECHO_INITIAL)
  const [trailing] = call.metadata.get(ECHO_TRAILING)
  const first = new grpc.Metadata()
  if (initial !== undefined) first.set(ECHO_INITIAL, initial)
  call.sendMetadata(first)
  const last = new grpc.Metadata()
  if (trailing !== undefined) last.set(ECHO_TRAILING, trailing)
  return last
}

function echoStatus({ response_status: status }, metadata) {
  if (status && status.code !== grpc.status.OK) throw failure(status.code, status.message, metadata)
}

// Makes a handler that answers with what `reply` returns, or with the failure that it throws.
const unary = reply => (call, callback) => {
  const trailers = echoMetadata(call)
  try {
    callback(null, reply(call.request, trailers), trailers)
  } catch (error) {
    callback(error)
  }
}

// Makes a handler that sends a stream of replies. `replies` is an async generator of them, from the stream of
// requests or from the only request. At the end of the requests an ordinary iterator would destroy the
// stream, and with it the replies that are not sent yet.
const streamed = replies => async call => {
  const trailers = echoMetadata(call)
  const once = event => new Promise(done => call.once(event, done))
  const cancelled = once('cancelled')
  try {
    for await (const reply of replies(call.request ?? call.iterator({ destroyOnReturn: false }), trailers)) {
      if (!call.write(reply)) await Promise.race([once('drain'), cancelled])
      if (call.cancelled) return
    }
    call.end(trailers)
  } catch (error) {
    if (!call.cancelled) call.emit('error', error)
  }
}

// Makes a handler that reads a stream of requests and sends one reply.
const collected = sum => async (call, callback) => {
  try {
    callback(null, await sum(call))
  } catch (error) {
    if (!call.cancelled) callback(error)
  }
}

async function * outputs({ response_parameters: parameters }) {
  for (const { size, interval_us: interval } of parameters) {
    if (interval > 0) await sleep(Math.min(interval / 1000, 60_000))
    yield { payload: zeros(size) }
  }
}

const testService = {
  EmptyCall: unary(() => ({})),
  UnaryCall: unary((request, trailers) => {
    echoStatus(request, trailers)
    return { payload: zeros(request.response_size) }
  }),
  // The reply is the time, as in the official servers, so that a reply from a cache can be recognised.
  CacheableUnaryCall: (call, callback) => {
    const head = new grpc.Metadata()
    head.set('cache-control', 'max-age=60, public')
    call.sendMetadata(head)
    callback(null, { payload: { body: Buffer.from(String(process.hrtime.bigint())) } })
  },
  StreamingOutputCall: streamed(outputs),
  StreamingInputCall: collected(async requests => {
    let total = 0
    for await (const request of requests) total += request.payload?.body.length ?? 0
    return { aggregated_payload_size: total }
  }),
  FullDuplexCall: streamed(async function * (requests, trailers) {
    for await (const request of requests) {
      echoStatus(request, trailers)
      yield * outputs(request)
    }
  }),
  HalfDuplexCall: streamed(async function * (requests) {
    const all = []
    for await (const request of requests) all.push(request)
    for (const request of all) yield * outputs(request)
  }),
}

function checkedReply(request, number = 0) {
  const { reply_bytes: size, period } = request
  if (size > LARGEST) throw failure(grpc.status.INVALID_ARGUMENT, `a reply of ${size} bytes was asked for`)
  const seed = (request.reply_seed + number) >>> 0
  return {
    seed,
    payload: content(seed, size, period),
    received_bytes: request.payload.length,
    first_mismatch: firstMismatch(request.seed, request.payload, period),
  }
}

const checked = {
  Unary: unary(request => checkedReply(request)),
  Collect: collected(async requests => {
    const reply = { received_bytes: 0, first_mismatch: 0 }
    for await (const { seed, payload, period } of requests) {
      reply.received_bytes += payload.length
      reply.first_mismatch ||= firstMismatch(seed, payload, period)
    }
    return reply
  }),
  Produce: streamed(async function * (request) {
    for (let number = 0; number < request.count; number++) yield checkedReply(request, number)
  }),
  Exchange: streamed(async function * (requests) {
    for await (const request of requests) yield checkedReply(request)
  }),
  Fail: ({ request }, callback) => {
    const trailers = new grpc.Metadata()
    trailers.set('grpc-status-details-bin', request.details)
    trailers.set('x-checked-bin', request.details)
    callback(failure(request.code, request.message, trailers))
  },
}

function serve(flags) {
  const { host, port } = flags
  const server = new grpc.Server(limits)
  // The service that no server has gets no handler: the library answers its calls.
  server.addService(TestService.service, testService)
  server.addService(Checked.service, checked)
  server.bindAsync(`${host}:${port}`, tls.server(flags), (error, bound) => {
    if (error) throw error
    console.log(bound)
  })
}

module.exports = { serve }
