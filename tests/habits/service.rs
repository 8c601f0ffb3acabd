//! A greeter that does what a test tells it to, by the name to be greeted.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Semaphore;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::RdmaConnectInfo;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::Greeter;
use tonic_rdma_proto::greeter::{HelloReply, HelloRequest};

/// The service, and what a test sees of it.
#[derive(Clone, Debug)]
pub(crate) struct Habits {
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    calls: AtomicUsize,
    active: AtomicUsize,
    most: AtomicUsize,
    dropped: AtomicUsize,
    held: Semaphore,
}

impl Habits {
    pub(crate) fn new() -> Self {
        let [calls, active, most, dropped] = [const { AtomicUsize::new(0) }; 4];
        Self { state: Arc::new(State { calls, active, most, dropped, held: Semaphore::new(0) }) }
    }

    /// Calls that came so far.
    pub(crate) fn calls(&self) -> usize {
        self.state.calls.load(Ordering::SeqCst)
    }

    /// Calls being held now.
    pub(crate) fn active(&self) -> usize {
        self.state.active.load(Ordering::SeqCst)
    }

    /// Calls held at once at most.
    pub(crate) fn most(&self) -> usize {
        self.state.most.load(Ordering::SeqCst)
    }

    /// Held calls whose client went away before they were let go.
    pub(crate) fn dropped(&self) -> usize {
        self.state.dropped.load(Ordering::SeqCst)
    }

    /// Lets so many held calls go, now or when they come.
    pub(crate) fn let_go(&self, calls: usize) {
        self.state.held.add_permits(calls);
    }

    async fn hold(&self) {
        let mut held = Held { state: &self.state, let_go: false };
        let active = self.state.active.fetch_add(1, Ordering::SeqCst) + 1;
        self.state.most.fetch_max(active, Ordering::SeqCst);
        self.state.held.acquire().await.unwrap().forget();
        held.let_go = true;
    }
}

struct Held<'a> {
    state: &'a State,
    let_go: bool,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.state.active.fetch_sub(1, Ordering::SeqCst);
        self.state.dropped.fetch_add(usize::from(!self.let_go), Ordering::SeqCst);
    }
}

#[tonic::async_trait]
impl Greeter for Habits {
    /// `hold` is answered when the test lets it go; `over`, `peer` and `header NAME` with what the server sees, `process` with
    /// whose number it has; anything else comes back.
    async fn say_hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        self.state.calls.fetch_add(1, Ordering::SeqCst);
        let message = match &*request.get_ref().name {
            "hold" => {
                self.hold().await;
                "held".into()
            }
            "over" => over(&request),
            "peer" => peer(&request),
            "process" => std::process::id().to_string(),
            name => match name.strip_prefix("header ") {
                Some(name) => format!("{:?}", request.metadata().get(name)),
                None => name.into(),
            },
        };
        Ok(Response::new(HelloReply { message }))
    }

    type ChatStream = Pin<Box<dyn Stream<Item = Result<HelloReply, Status>> + Send>>;

    /// Sends every name back as it comes.
    async fn chat(
        &self,
        request: Request<Streaming<HelloRequest>>,
    ) -> Result<Response<Self::ChatStream>, Status> {
        self.state.calls.fetch_add(1, Ordering::SeqCst);
        let replies = request.into_inner().map(|name| name.map(|name| HelloReply { message: name.name }));
        Ok(Response::new(Box::pin(replies)))
    }
}

fn over(request: &Request<HelloRequest>) -> String {
    let info = request.extensions().get::<RdmaConnectInfo>();
    info.map_or("stock".into(), |info| info.verdict().to_string())
}

fn peer(request: &Request<HelloRequest>) -> String {
    let info = request.extensions().get::<RdmaConnectInfo>();
    format!("{:?}", info.map(RdmaConnectInfo::peer_addr).or(request.remote_addr()))
}

/// Asks a greeter, over whatever channel.
pub(crate) async fn say<T>(client: &mut GreeterClient<T>, name: impl Into<String>) -> Result<String, Status>
where
    T: tonic::client::GrpcService<tonic::body::Body>,
    T::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    T::ResponseBody: http_body::Body<Data = bytes::Bytes> + Send + 'static,
    <T::ResponseBody as http_body::Body>::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send,
{
    Ok(client.say_hello(HelloRequest { name: name.into() }).await?.into_inner().message)
}

/// What a call came to, to be compared: its answer, or its code and message.
pub(crate) fn outcome(result: Result<String, Status>) -> Result<String, (tonic::Code, String)> {
    result.map_err(|status| (status.code(), status.message().to_owned()))
}
