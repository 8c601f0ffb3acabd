//! The other process: this binary once more, which serves until its standard input ends.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::RdmaIncoming;
use tonic_rdma::tensor::{Offer, RdmaDevice, Rights, TensorMut};
use tonic_rdma_proto::greeter::greeter_server::{Greeter, GreeterServer};
use tonic_rdma_proto::greeter::{HelloReply, HelloRequest};

use super::client::{Cell, Path};
use super::content::{check, spec, stamp};
use super::runtimes::Flavour;

/// First argument of the other process.
pub(crate) const ARGUMENT: &str = "server";

/// Where it serves.
#[derive(Clone, Debug)]
pub(crate) struct Addresses {
    pub(crate) tcp: String,
    pub(crate) rdma: String,
    pub(crate) device: String,
}

/// The other process as the measuring one has it.
pub(crate) struct ServerProcess {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    addresses: Addresses,
}

impl ServerProcess {
    pub(crate) fn start(cell: Cell) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args([ARGUMENT, cell.runtime.name(), cell.path.name(), &cell.bytes.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = process.stdin.take();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let mut words = line.split_whitespace().map(str::to_owned);
        let mut word = || words.next().expect("the server names its addresses");
        let addresses = Addresses { tcp: word(), rdma: word(), device: word() };
        Self { process, input, output, addresses }
    }

    pub(crate) fn addresses(&self) -> Addresses {
        self.addresses.clone()
    }

    /// Ends it; its naps.
    pub(crate) fn end(mut self) -> u64 {
        drop(self.input.take());
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert!(self.process.wait().unwrap().success(), "the server failed");
        line.trim().parse().unwrap_or(0)
    }
}

/// Waits of this process that only the safety net ended.
pub(crate) fn naps() -> u64 {
    0
}

struct MyGreeter;

#[tonic::async_trait]
impl Greeter for MyGreeter {
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

pub(crate) fn run(arguments: &[String]) {
    let [runtime, path, bytes] = arguments else { panic!("server RUNTIME PATH BYTES, not {arguments:?}") };
    let (path, bytes) = (Path::from_name(path), bytes.parse().unwrap());
    let (sender, ended) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let _ = sender.send(());
    });
    Flavour::from_name(runtime).run(async {
        tokio::select! {
            () = serve(path, bytes) => {}
            _ = ended => {}
        }
    });
    println!("{}", naps());
}

async fn serve(path: Path, bytes: usize) {
    let tcp = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap().with_nodelay(Some(true));
    let rdma = RdmaIncoming::bind("127.0.0.1:0").await.unwrap();
    let device = RdmaDevice::new(1, 2, "127.0.0.1:0").await.unwrap();
    let ready = (tcp.local_addr().unwrap(), rdma.local_addr(), device.endpoint());
    let say = || {
        println!("{} {} {}", ready.0, ready.1, ready.2);
        std::io::stdout().flush().unwrap();
    };
    let limit = 64 << 20;
    let greeter = || GreeterServer::new(MyGreeter).max_decoding_message_size(limit);
    let mut step = 0;
    match path {
        Path::GrpcTcp => {
            say();
            Server::builder().add_service(greeter()).serve_with_incoming(tcp).await.unwrap();
        }
        Path::GrpcRdma => {
            say();
            Server::builder().add_service(greeter()).serve_with_incoming(rdma).await.unwrap();
        }
        Path::Static | Path::Static2 => {
            let depth = if path == Path::Static { 1 } else { 2 };
            let mut receiver = device.static_receiver("slot", &spec(bytes), depth).unwrap();
            say();
            while let Ok(arrived) = receiver.recv().await {
                let (memory, range) = arrived.memory();
                let (mut first, mut last) = ([0; 8], [0; 8]);
                memory.copy_out(range.start, &mut first).unwrap();
                memory.copy_out(range.end - 8, &mut last).unwrap();
                check(&first, &last, step);
                step += 1;
            }
        }
        Path::Dynamic => {
            let mut receiver = device.dynamic_receiver("slot", 2).unwrap();
            say();
            while let Ok(tensor) = receiver.recv().await {
                let bytes = tensor.bytes().unwrap();
                check(bytes, bytes, step);
                step += 1;
            }
        }
        Path::Rendezvous => {
            let pool = tonic_rdma::memory::Pool::for_sending(1 << 28);
            say();
            // Steps ahead of the client, more than it can take in tokio's shortest sleep.
            let ahead = if bytes <= 4096 { 512 } else { 32 };
            loop {
                while device.held().offers < ahead {
                    let mut tensor = TensorMut::in_pool(spec(bytes), &pool).unwrap();
                    stamp(tensor.bytes_mut(), step);
                    device.put("tensor", step, Offer::Tensor(tensor.freeze()), 1).unwrap();
                    step += 1;
                }
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
        }
        Path::Memcpy => {
            let memory = device.allocate(bytes).unwrap();
            let _region = device.export("region", memory, Rights::READ_WRITE).unwrap();
            say();
            std::future::pending::<()>().await;
        }
    }
}
