//! "Large messages": payloads by reference, from any memory and from registered memory.

use tonic::transport::{Channel, Server};
use tonic_rdma::gather::GatherRequests;
use tonic_rdma::memory::Pool;
use tonic_rdma::{RdmaConnector, RdmaIncoming};
use tonic_rdma_proto::transfer::PutRequest;
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tonic_rdma_proto::transfer::transfer_server::TransferServer;

use super::addresses::{self, Endpoint};
use super::put::{Takes, byte};
use super::running::{self, Outcome, ROUNDS, default_runtime};

/// The length of a payload in bytes, long enough to go by reference.
pub(crate) const LENGTH: usize = 128 << 10;

pub(crate) type Client = TransferClient<GatherRequests<Channel>>;

#[test]
fn large_requests() {
    running::run(default_runtime(), async {
        let mut client = connect().await?;
        for round in 0..ROUNDS {
            let payload = vec![byte(round); LENGTH].into();
            let reply = client.put(PutRequest { payload, ..Default::default() }).await?;
            assert_eq!(reply.into_inner().bytes, LENGTH as u64);
        }
        Ok(())
    });
}

#[test]
fn from_registered_memory() {
    running::run(default_runtime(), async {
        let (mut client, pool) = (connect().await?, pool());
        for round in 0..ROUNDS {
            put_from(&pool, &mut client, LENGTH, round).await?;
        }
        Ok(())
    });
}

/// Starts a server and connects to it. The server ends with the runtime.
pub(crate) async fn connect() -> Outcome<Client> {
    let incoming = RdmaIncoming::bind("127.0.0.1:0").await?;
    addresses::listens("ps0:50051", incoming.local_addr());
    tokio::spawn(server(TransferServer::new(Takes::default()), incoming));
    let endpoint = Endpoint::from_static("http://ps0:50051");
    Ok(client(endpoint.connect_with_connector(RdmaConnector::new()).await?))
}

#[allow(unused_mut, reason = "the book's readers call it")]
#[rustfmt::skip]
fn client(channel: Channel) -> Client {
    // client: large requests
    let mut client = TransferClient::new(tonic_rdma::gather::GatherRequests::new(channel)); // was: TransferClient::new(channel)
    client
}

#[rustfmt::skip]
async fn server(service: TransferServer<Takes>, incoming: RdmaIncoming) -> Outcome {
    // server: large answers
    Server::builder().layer(tonic_rdma::gather::GatherResponses::new())                     // was: Server::builder()
        .add_service(service).serve_with_incoming(incoming).await?;
    Ok(())
}

#[rustfmt::skip]
pub(crate) fn pool() -> Pool {
    let pool = tonic_rdma::memory::Pool::for_sending(1 << 30);                     // bytes in use at a time
    pool
}

#[rustfmt::skip]
async fn put_from(pool: &Pool, client: &mut Client, length: usize, round: u64) -> Outcome {
    let mut tensor = pool.allocate(length)?;                                       // fill it: &mut [u8]
    tensor.fill(byte(round));
    client.put(PutRequest { payload: tensor.freeze(), ..Default::default() }).await?;
    Ok(())
}
