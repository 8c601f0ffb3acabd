//! A greeter that says what carried the call.

use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::RdmaConnectInfo;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::Greeter;
use tonic_rdma_proto::greeter::{HelloReply, HelloRequest};

use super::running::{Outcome, TURNS};

#[derive(Clone, Debug)]
pub(crate) struct Greets {
    /// Tells servers apart.
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

/// Has the server `ps0` greet a thousand times.
pub(crate) async fn greet_often(channel: Channel) -> Outcome {
    let mut client = GreeterClient::new(channel);
    for turn in 0..TURNS {
        let reply = client.say_hello(HelloRequest { name: turn.to_string() }).await?;
        assert_eq!(reply.into_inner().message, format!("ps0 greets {turn} over rdma"));
    }
    Ok(())
}
