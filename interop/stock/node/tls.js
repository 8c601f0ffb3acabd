// TLS: the official programs' flags, those that name files, and credentials from them.
const { X509Certificate } = require('crypto')
const fs = require('fs')
const { createSecureContext } = require('tls')
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

// OpenSSL's error names the fault, but neither the flag nor the file, so this error adds both.
function check(flags, names) {
  const [ca, key, cert] = names.map(name => content(flags, name) ?? undefined)
  try {
    createSecureContext({ ca, key, cert })
    // createSecureContext ignores a file that has no certificate of an authority.
    if (ca) new X509Certificate(ca)
  } catch (error) {
    const files = names.filter(name => flags[name]).map(name => `--${name}=${flags[name]}`)
    throw new Error(`${files.join(' ')}: ${error.message}`)
  }
  return [ca ?? null, key ?? null, cert ?? null]
}

function client(flags) {
  if (!wanted(flags, 'use_tls')) return grpc.credentials.createInsecure()
  const testCa = wanted(flags, 'use_test_ca')
  if (testCa && !flags.ca_file) throw new Error('--use_test_ca needs --ca_file')
  const [ca, key, cert] = check(flags, ['ca_file', 'client_key_file', 'client_cert_file'])
  return grpc.credentials.createSsl(testCa ? ca : null, key, cert)
}

// With --client_ca_file each client has to show a certificate.
function server(flags) {
  if (!wanted(flags, 'use_tls')) return grpc.ServerCredentials.createInsecure()
  const [ca, key, cert] = check(flags, ['client_ca_file', 'key_file', 'cert_file'])
  if (!key || !cert) throw new Error('--use_tls needs --cert_file and --key_file')
  return grpc.ServerCredentials.createSsl(ca, [{ private_key: key, cert_chain: cert }], ca !== null)
}

// The options for a host in certificates and requests that differs from --server_host.
function host({ server_host_override: name }) {
  return name === undefined ? {} : { 'grpc.ssl_target_name_override': name, 'grpc.default_authority': name }
}

module.exports = { client, server, host }
