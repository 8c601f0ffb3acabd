// TLS: the official programs' flags, those that name files, and credentials from them.
const fs = require('fs')
const grpc = require('@grpc/grpc-js')

function wanted(flags, name) {
  const value = flags[name]
  if (!['true', 'false'].includes(value)) throw new Error(`--${name}: true or false, not ${value}`)
  return value === 'true'
}

function content(flags, name) {
  if (flags[name] === undefined) return null
  try {
    return fs.readFileSync(flags[name])
  } catch (error) {
    throw new Error(`--${name}: ${error.message}`)
  }
}

// Something that OpenSSL may throw, which says neither flag nor file.
function made(flags, names, make) {
  try {
    return make()
  } catch (error) {
    const files = names.filter(name => flags[name]).map(name => `--${name}=${flags[name]}`)
    throw new Error(`${files.join(' ')}: ${error.message}`)
  }
}

function client(flags) {
  if (!wanted(flags, 'use_tls')) return grpc.credentials.createInsecure()
  const testCa = wanted(flags, 'use_test_ca')
  if (testCa && !flags.ca_file) throw new Error('--use_test_ca needs --ca_file')
  const [ca, key, cert] = ['ca_file', 'client_key_file', 'client_cert_file'].map(name => content(flags, name))
  return made(flags, ['ca_file', 'client_key_file', 'client_cert_file'],
    () => grpc.credentials.createSsl(testCa ? ca : null, key, cert))
}

// With --client_ca_file each client has to show a certificate.
function server(flags) {
  if (!wanted(flags, 'use_tls')) return grpc.ServerCredentials.createInsecure()
  const [ca, key, cert] = ['client_ca_file', 'key_file', 'cert_file'].map(name => content(flags, name))
  if (!key || !cert) throw new Error('--use_tls needs --cert_file and --key_file')
  return made(flags, ['client_ca_file', 'key_file', 'cert_file'],
    () => grpc.ServerCredentials.createSsl(ca, [{ private_key: key, cert_chain: cert }], ca !== null))
}

// The host that the server is asked to be, if not where it is.
function host({ server_host_override: name }) {
  return name === undefined ? {} : { 'grpc.ssl_target_name_override': name, 'grpc.default_authority': name }
}

module.exports = { client, server, host }
