//! "Native calls": large messages without a copy at either end.

use tonic_rdma::gather::{GatherBoth, GatherBothLayer};
use tonic_rdma::{RdmaChannel, RdmaIncoming, RdmaServer};
use tonic_rdma_proto::transfer::PutRequest;
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tonic_rdma_proto::transfer::transfer_server::TransferServer;
use tower::layer::util::{Identity, Stack};

use super::gather::LENGTH;
use super::put::{Takes, byte};
use super::running::{self, ROUNDS, default_runtime};

#[test]
fn large_requests_land() {
    running::run(default_runtime(), async {
        let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
        let address = incoming.local_addr();
        tokio::spawn(server(TransferServer::new(Takes::default())).serve_with_incoming(incoming));
        let channel = RdmaChannel::connect(format!("http://{address}")).await?;
        let pool = super::gather::pool();
        let mut client = client(channel.clone());
        for round in 0..ROUNDS {
            let mut tensor = pool.allocate(LENGTH)?;
            tensor.fill(byte(round));
            let request = PutRequest { payload: tensor.freeze(), ..Default::default() };
            let reply = client.put(request).await?;
            assert_eq!(reply.into_inner().bytes, LENGTH as u64);
        }
        let counters = channel.last_connection().expect("a connection").counters();
        assert_eq!(counters.offered_in_place_bytes, ROUNDS * LENGTH as u64);
        assert_eq!(counters.offered_copied_bytes, 0);
        Ok(())
    });
}

#[allow(unused_mut, reason = "the book's readers call it")]
#[rustfmt::skip]
fn client(channel: RdmaChannel) -> TransferClient<GatherBoth<RdmaChannel>> {
    let mut client = TransferClient::new(tonic_rdma::gather::GatherBoth::new(channel));                     // an RdmaChannel
    client
}

#[rustfmt::skip]
fn server(service: TransferServer<Takes>) -> RdmaServer<Stack<GatherBothLayer, Identity>> {
    let server = RdmaServer::new().layer(tonic_rdma::gather::GatherBothLayer::new()).add_service(service);  // all its services use GatherCodec
    server
}
