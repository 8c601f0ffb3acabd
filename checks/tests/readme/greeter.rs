//! A greeter whose answers name the transport of the call.

use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::RdmaConnectInfo;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::Greeter;
use tonic_rdma_proto::greeter::{HelloReply, HelloRequest};

use super::running::{Outcome, ROUNDS};

#[derive(Clone, Debug)]
pub(crate) struct Greets {
    /// The name of the server.
    pub(crate) name: &'static str,
}

#[tonic::async_trait]
impl Greeter for Greets {
    async fn say_hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        let over = request.extensions().get::<RdmaConnectInfo>().map(|info| info.verdict().to_string());
        let over = over.as_deref().unwrap_or("nothing known");
        let message = format!("{} greets {} over {over}", self.name, request.get_ref().name);
        Ok(Response::new(HelloReply { message }))
    }

    type ChatStream = tokio_stream::Empty<Result<HelloReply, Status>>;

    async fn chat(&self, _: Request<Streaming<HelloRequest>>) -> Result<Response<Self::ChatStream>, Status> {
        Err(Status::unimplemented("not here"))
    }
}

/// Makes a thousand calls, and checks that the server `ps0` answers each.
pub(crate) async fn greet_often(channel: Channel) -> Outcome {
    let mut client = GreeterClient::new(channel);
    for round in 0..ROUNDS {
        let reply = client.say_hello(HelloRequest { name: round.to_string() }).await?;
        assert_eq!(reply.into_inner().message, format!("ps0 greets {round} over rdma"));
    }
    Ok(())
}
