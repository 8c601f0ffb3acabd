//! A service that takes payloads and checks every byte of them.

use tonic::{Request, Response, Status, Streaming};
use tonic_rdma_proto::transfer::transfer_server::Transfer;
use tonic_rdma_proto::transfer::{PutReply, PutRequest, UsageReply, UsageRequest};

/// All bytes of a payload are the same, another in each turn.
pub(crate) fn byte(turn: u64) -> u8 {
    turn as u8 ^ 0x5a
}

/// Demands that all bytes are as they should be in this turn.
pub(crate) fn check(bytes: &[u8], turn: u64) {
    assert!(bytes == vec![byte(turn); bytes.len()], "turn {turn}: another payload than was sent");
}

/// Expects turns one after the other, from 0.
#[derive(Debug, Default)]
pub(crate) struct Takes {
    turns: std::sync::atomic::AtomicU64,
}

#[tonic::async_trait]
impl Transfer for Takes {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let turn = self.turns.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let payload = request.into_inner().payload;
        check(&payload, turn);
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
