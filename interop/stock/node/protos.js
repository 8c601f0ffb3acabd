// The services of interop/proto, loaded at run time.
const path = require('path')
const grpc = require('@grpc/grpc-js')
const loader = require('@grpc/proto-loader')

const definition = loader.loadSync(['grpc/testing/test.proto', 'checked.proto'], {
  includeDirs: [path.join(__dirname, '../../proto')],
  keepCase: true,
  longs: Number,
  defaults: true,
})
const { grpc: { testing }, tonic_rdma: { interop: { v1: checked } } } = grpc.loadPackageDefinition(definition)

const MIB = 1 << 20
const limits = { 'grpc.max_receive_message_length': 64 * MIB, 'grpc.max_send_message_length': 64 * MIB }

module.exports = {
  TestService: testing.TestService,
  UnimplementedService: testing.UnimplementedService,
  Checked: checked.Checked,
  limits,
}
