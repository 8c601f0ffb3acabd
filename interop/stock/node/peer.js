// A gRPC peer on grpc-js, with the flags of gRPC's official interop programs (see interop/README.md).
//
//   node peer.js server --port=PORT
//   node peer.js client --server_host=HOST --server_port=PORT --test_case=NAME[,NAME...]
//   node peer.js client --list
const { parseArgs } = require('util')

const LIMIT_MS = 30_000
const option = value => ({ type: 'string', default: value })
const options = {
  host: option('127.0.0.1'),
  port: option('0'),
  server_host: option('127.0.0.1'),
  server_port: option(undefined),
  test_case: option(''),
  use_tls: option('false'),
  use_test_ca: option('false'),
  server_host_override: option(undefined),
  ca_file: option(undefined),
  client_cert_file: option(undefined),
  client_key_file: option(undefined),
  cert_file: option(undefined),
  key_file: option(undefined),
  client_ca_file: option(undefined),
  list: { type: 'boolean', default: false },
  soak_iterations: option('100'),
  soak_num_threads: option('4'),
  soak_max_failures: option('0'),
}
for (const it of Object.values(options)) if (it.default === undefined) delete it.default

async function one(name, { table, cannot }, flags) {
  const body = table[name]
  if (!body) return `skipped: ${cannot[name] ?? 'this peer does not have the case'}`
  let timer
  const limit = new Promise((_, fail) => {
    timer = setTimeout(() => fail(new Error(`not done after ${LIMIT_MS / 1000} s`)), LIMIT_MS)
  })
  try {
    await Promise.race([body(flags), limit])
    return 'ok'
  } catch (error) {
    return `failed: ${String(error.message ?? error).replace(/\s+/g, ' ').slice(0, 600)}`
  } finally {
    clearTimeout(timer)
  }
}

async function main() {
  const { values: flags, positionals: [program] } = parseArgs({ options, allowPositionals: true })
  if (program === 'server') return require('./service').serve(flags)
  if (program !== 'client') throw new Error('peer.js server|client, see interop/README.md')
  const cases = require('./cases')
  if (flags.list) return console.log(Object.keys(cases.table).join('\n'))
  flags.credentials = require('./tls').client(flags)
  let failed = 0
  for (const name of flags.test_case.split(',').filter(Boolean)) {
    const outcome = await one(name, cases, flags)
    console.log(`${name} ${outcome}`)
    if (outcome.startsWith('failed')) failed = 1
  }
  process.exit(failed)
}

main().catch(error => {
  console.error(error.message)
  process.exit(2)
})
