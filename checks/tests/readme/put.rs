//! A service that takes payloads and checks every byte of them.

use tonic::{Request, Response, Status, Streaming};
use tonic_rdma_proto::transfer::transfer_server::Transfer;
use tonic_rdma_proto::transfer::{PutReply, PutRequest, UsageReply, UsageRequest};

/// Returns the value of all bytes of a payload, which differs between rounds.
pub(crate) fn byte(round: u64) -> u8 {
    round as u8 ^ 0x5a
}

/// Checks that all bytes have the value of this round.
pub(crate) fn check(bytes: &[u8], round: u64) {
    assert!(bytes == vec![byte(round); bytes.len()], "round {round}: another payload than was sent");
}

/// The service. It expects the rounds in order, from 0.
#[derive(Debug, Default)]
pub(crate) struct Takes {
    rounds: std::sync::atomic::AtomicU64,
}

#[tonic::async_trait]
impl Transfer for Takes {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let round = self.rounds.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let payload = request.into_inner().payload;
        check(&payload, round);
        Ok(Response::new(PutReply { bytes: payload.len() as u64, ..Default::default() }))
    }

    type EchoStream = Streaming<PutRequest>;

    async fn echo(&self, request: Request<Self::EchoStream>) -> Result<Response<Self::EchoStream>, Status> {
        Ok(Response::new(request.into_inner()))
    }

    async fn usage(&self, _: Request<UsageRequest>) -> Result<Response<UsageReply>, Status> {
        Err(Status::unimplemented("not here"))
    }
}
