// Connects, and makes calls as promises.
const assert = require('assert/strict')
const grpc = require('@grpc/grpc-js')
const { limits } = require('./protos')
const tls = require('./tls')

const options = { ...limits, 'grpc.use_local_subchannel_pool': 1, 'grpc.enable_http_proxy': 0 }

// Runs `body` with a client of the service, which has its own connection.
async function withClient(Service, flags, body, more = {}) {
  const address = `${flags.server_host}:${flags.server_port}`
  const client = new Service(address, flags.credentials, { ...options, ...tls.host(flags), ...more })
  try {
    return await body(client)
  } finally {
    client.close()
  }
}

function metadata(entries = {}) {
  const all = new grpc.Metadata()
  for (const [key, value] of Object.entries(entries)) all.set(key, value)
  return all
}

// Makes a unary call. Returns its reply, and its initial and trailing metadata.
function unary(client, method, request, entries) {
  const sent = metadata(entries)
  return new Promise((resolve, reject) => {
    let initial = new grpc.Metadata()
    let reply
    const call = client[method](request, sent, (error, message) => (error ? reject(error) : (reply = message)))
    call.on('metadata', it => { initial = it })
    call.on('status', ({ code, metadata: trailing }) => code === 0 && resolve({ reply, initial, trailing }))
  })
}

// Makes a call with a stream of requests and one reply. `flags` are those of the requests' messages: grpc-js
// takes them as the argument of `write` that other streams have for the encoding.
function collect(client, method, requests, flags = []) {
  return new Promise((resolve, reject) => {
    const call = client[method]((error, reply) => (error ? reject(error) : resolve(reply)))
    for (const [number, request] of requests.entries()) call.write(request, flags[number] ?? 0)
    call.end()
  })
}

// Returns the error of a call, which must end with the status `code`.
async function refused(code, outcome) {
  const error = await outcome.then(
    () => assert.fail(`expected status ${grpc.status[code]}, got an answer`),
    error => error,
  )
  assert.equal(grpc.status[error.code], grpc.status[code], error.message)
  return error
}

async function all(stream) {
  const replies = []
  for await (const reply of stream) replies.push(reply)
  return replies
}

// Returns a function that reads the next reply of a stream, or undefined at its end.
const reader = stream => {
  const iterator = stream[Symbol.asyncIterator]()
  return async () => (await iterator.next()).value
}

module.exports = { withClient, metadata, unary, collect, refused, all, reader }
