//! A greeter, and a service that takes payloads. Both check what arrives.

use tonic::{Request, Response, Status, Streaming};
use tonic_rdma_proto::greeter::greeter_server::Greeter;
use tonic_rdma_proto::greeter::{HelloReply, HelloRequest};
use tonic_rdma_proto::transfer::transfer_server::Transfer;
use tonic_rdma_proto::transfer::{PutReply, PutRequest, UsageReply, UsageRequest};

use super::content::is;

/// Greets the number that is at the start and at the end of the name.
pub(crate) struct Greets;

#[tonic::async_trait]
impl Greeter for Greets {
    async fn say_hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        let name = request.into_inner().name;
        let (first, last) = (&name[..8], &name[name.len() - 8..]);
        if first != last {
            return Err(Status::data_loss("another message than was sent"));
        }
        Ok(Response::new(HelloReply { message: format!("Hello {first}") }))
    }

    type ChatStream = tokio_stream::Empty<Result<HelloReply, Status>>;

    async fn chat(&self, _: Request<Streaming<HelloRequest>>) -> Result<Response<Self::ChatStream>, Status> {
        Err(Status::unimplemented("not measured"))
    }
}

/// Takes payloads with the seed at both ends.
pub(crate) struct Takes;

#[tonic::async_trait]
impl Transfer for Takes {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let PutRequest { seed, payload, .. } = request.into_inner();
        if !is(&payload, seed) {
            return Err(Status::data_loss("another message than was sent"));
        }
        Ok(Response::new(PutReply { bytes: payload.len() as u64, ..Default::default() }))
    }

    type EchoStream = Streaming<PutRequest>;

    async fn echo(&self, request: Request<Self::EchoStream>) -> Result<Response<Self::EchoStream>, Status> {
        Ok(Response::new(request.into_inner()))
    }

    async fn usage(&self, _: Request<UsageRequest>) -> Result<Response<UsageReply>, Status> {
        Err(Status::unimplemented("not measured"))
    }
}
