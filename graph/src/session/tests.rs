//! Calls of callers that do not keep to the protocol.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use tokio::net::TcpSocket;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;
use tonic_rdma_tensor::Dtype;
use tonic_rdma_tensor::unstable::bootstrap::VERSION;
use tonic_rdma_tensor::unstable::bootstrap::proto::bootstrap_client::BootstrapClient;
use tonic_rdma_tensor::unstable::bootstrap::proto::{JoinReply, JoinRequest, Member, WatchRequest};

use super::{Listener, Peering};
use crate::dataflow::{Dim, Fact, Node, NodeId, Outlet, Role, Topology};
use crate::error::{GraphError, Problem};
use crate::placement::{Part, Partition, Placements};
use crate::transfer::TransferMode;
use crate::transfer::proto::parts_client::PartsClient;
use crate::transfer::proto::{PutReply, PutRequest};

/// A caller of part 0.
#[derive(Clone)]
struct Client {
    bootstrap: BootstrapClient<Channel>,
    parts: PartsClient<Channel>,
    /// What part 1 says of itself.
    right: JoinRequest,
}

impl Client {
    async fn join(&self, request: JoinRequest) -> Result<JoinReply, Status> {
        self.bootstrap.clone().join(request).await.map(tonic::Response::into_inner)
    }
}

/// A graph whose node `fixed` sends six bytes, and whose node `free` sends any number, from part 1 to part 0;
/// and one the other way.
fn graph() -> (Topology, Arc<Placements>) {
    let mut graph = Topology::new();
    let mut node = |name: &str, role, inputs: &[usize], dims: Vec<Dim>| {
        let inputs = inputs.iter().map(|node| Outlet { node: NodeId(*node), output: 0 }).collect();
        let outputs = vec![Fact { dtype: Dtype::U8, dims }];
        let (name, kind) = (name.to_owned(), "Test".to_owned());
        graph.add(Node { name, kind, role, inputs, outputs, work: 1, stays: false }).unwrap();
    };
    node("fixed", Role::Input, &[], vec![Dim::Known(2), Dim::Known(3)]);
    node("free", Role::Input, &[], vec![Dim::Symbolic("N".into())]);
    node("sum", Role::Compute, &[0, 1], vec![Dim::Known(4)]);
    node("end", Role::Compute, &[2], vec![Dim::Known(4)]);
    let partition = Partition::new(&graph, 2, [1, 1, 0, 1].map(Part).to_vec()).unwrap();
    let placements = Arc::new(Placements::new(&graph, &partition).unwrap());
    (graph, placements)
}

/// Runs `calls` while part 0 connects. Returns how the connecting ended.
fn while_connecting<F: Future<Output = ()>>(calls: impl FnOnce(Client, JoinReply) -> F) -> GraphError {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (graph, placements) = graph();
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let address = listener.address();
    // Bound, but not listening, so that calls to part 1 fail.
    let absent = TcpSocket::new_v4().unwrap();
    absent.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let peers = vec![address.to_string(), absent.local_addr().unwrap().to_string()];
    let peering = Peering::new(Part(0), peers, &graph, &placements)
        .modes([TransferMode::GrpcTcp, TransferMode::RdmaZerocp])
        .window(2)
        // All calls have to be made within this time, also on a slow machine.
        .timeout(Duration::from_secs(10));
    let right = JoinRequest {
        version: VERSION,
        number: 1,
        size: 2,
        expected: 0,
        process: Bytes::from_static(b"the process"),
        common: peering.common(),
        member: Some(Member { address: "127.0.0.1:1".into(), about: Bytes::new() }),
        wait: false,
    };
    let connecting = thread::spawn(move || listener.connect(peering).unwrap_err());
    runtime.block_on(async {
        let (client, reply) = hello(address, right).await;
        calls(client, reply).await;
    });
    connecting.join().unwrap()
}

/// Calls part 0 until it connects, with a description that does not fit.
async fn hello(address: SocketAddr, right: JoinRequest) -> (Client, JoinReply) {
    let bootstrap = BootstrapClient::connect(format!("http://{address}")).await.unwrap();
    let parts = PartsClient::connect(format!("http://{address}")).await.unwrap();
    let client = Client { bootstrap, parts, right };
    loop {
        // As part 7, which does not exist, so that part 0 notes no difference of part 1.
        match client.join(JoinRequest { number: 7, common: HashMap::new(), ..client.right.clone() }).await {
            Ok(reply) => return (client, reply),
            Err(status) => assert_eq!(status.code(), Code::Unavailable, "{status}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Makes the connecting of part 0 fail: part 1 speaks a version that does not exist.
async fn end(client: Client) {
    let reply = client.join(JoinRequest { version: 9, ..client.right.clone() }).await.unwrap();
    assert!(reply.key.is_empty());
}

#[test]
fn another_version_is_named() {
    let error = while_connecting(|client, server| async move {
        assert_eq!((server.version, server.number), (VERSION, 0));
        assert!(server.key.is_empty(), "no secret for a caller that runs something else");
        assert!(
            server.differs.starts_with("the graph, the modes, the number of parts, "),
            "{}",
            server.differs
        );
        end(client).await;
    });
    assert!(matches!(error.problem(), Problem::Version { peer: 1, ours: VERSION, theirs: 9, .. }), "{error}");
}

/// A process of an earlier run may call before the right one does.
#[test]
fn a_caller_that_fits_makes_up_for_one_that_does_not() {
    let error = while_connecting(|client, _| async move {
        end(client.clone()).await;
        // Gives part 0 time to end for this reason, which it must not.
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(client.join(client.right.clone()).await.unwrap().key.len(), 16);
    });
    // The right part can't be called in this test.
    assert!(matches!(error.problem(), Problem::Unreachable { peer: 1, .. }), "{error}");
}

#[test]
fn bad_calls_are_refused_by_name_and_harm_nothing() {
    let error = while_connecting(|client, _| async move {
        let right = client.right.clone();
        let refused_join = |request: JoinRequest| {
            let client = client.clone();
            async move { client.join(request).await.unwrap_err().message().to_owned() }
        };
        let anonymous = JoinRequest { member: None, ..right.clone() };
        let reason = "the caller's address is empty or longer than 256 bytes";
        assert_eq!(refused_join(anonymous).await, reason);
        let many = (0..65).map(|name| (name.to_string(), String::new())).collect();
        let long = JoinRequest { common: many, ..right.clone() };
        assert_eq!(refused_join(long).await, "the caller's description is too long");
        let third = JoinRequest { number: 2, ..right.clone() };
        assert_eq!(refused_join(third).await, "part 2 of 2: parts are from 0 to 1");
        let same = JoinRequest { number: 0, ..right.clone() };
        assert!(
            refused_join(same).await.starts_with("part 0 has come already"),
            "no other process is part 0"
        );
        let lost = client.join(JoinRequest { expected: 1, ..right.clone() }).await.unwrap();
        assert!(lost.key.is_empty() && lost.number == 0, "this is not part 1");
        let token = client.join(right.clone()).await.unwrap().key;
        assert_eq!((token.len(), client.join(right.clone()).await.unwrap().key), (16, token.clone()));
        let second = JoinRequest { process: Bytes::from_static(b"another one"), ..right };
        assert!(refused_join(second).await.starts_with("part 1 has come already"));

        let untrusted = WatchRequest { key: Bytes::from_static(&[0; 16]), number: 1 };
        let status = client.bootstrap.clone().watch(untrusted).await.unwrap_err();
        assert_eq!(status.message(), "the caller is no part of this session");
        // A key is that of one part.
        let other = WatchRequest { key: token.clone(), number: 0 };
        let status = client.bootstrap.clone().watch(other).await.unwrap_err();
        assert_eq!(status.message(), "the caller is no part of this session");

        let put = |change: &dyn Fn(&mut PutRequest)| {
            let content = Bytes::from_static(&[1, 2, 3, 4, 5, 6]);
            let (dtype, dims) = ("uint8".to_owned(), vec![2, 3]);
            let (key, part) = (token.clone(), 1);
            let mut request =
                PutRequest { key, part, mode: 1, crossing: 0, sequence: 0, step: 10, dtype, dims, content };
            change(&mut request);
            let mut client = client.parts.clone();
            async move { client.put(request).await.map(drop) }
        };
        let refused = |result: Result<(), Status>| {
            let status = result.unwrap_err();
            let bad = matches!(status.code(), Code::InvalidArgument | Code::FailedPrecondition);
            let is_marked = status.metadata().contains_key("tonic-rdma-graph-refusal");
            assert!(bad && is_marked, "{status:?}");
            status.message().to_owned()
        };
        for token in [Bytes::new(), Bytes::from_static(&[0; 16]), token.slice(1..)] {
            // Without a mark, the sender takes this for the end of an earlier process at this address.
            let status = put(&|it| it.key = token.clone()).await.unwrap_err();
            assert_eq!(status.message(), "the caller is no part of this session");
            assert!(status.metadata().get("tonic-rdma-graph-refusal").is_none(), "{status:?}");
        }
        for mode in [0, 2, 9] {
            assert_eq!(
                refused(put(&|it| it.mode = mode).await),
                format!("mode {mode} is not one of this session")
            );
        }
        let reason = refused(put(&|it| it.mode = 5).await);
        assert_eq!(reason, "no call brings a tensor in mode rdma-zerocp");
        // Crossing tensor 2 goes the other way.
        for crossing in [2, 3, u64::MAX] {
            let reason = refused(put(&|it| it.crossing = crossing).await);
            assert_eq!(reason, format!("no crossing tensor {crossing} goes from part 1 to part 0"));
        }
        let fixed = |reason: &str| format!("crossing tensor \"fixed to part 0\": {reason}");
        assert_eq!(refused(put(&|it| it.dtype = "u9".into()).await), fixed("its type is unknown"));
        assert_eq!(
            refused(put(&|it| it.dims = vec![6]).await),
            fixed("the graph says uint8[2, 3], and uint8[6] came")
        );
        let reason = refused(put(&|it| it.content = Bytes::from_static(&[1; 5])).await);
        assert_eq!(reason, fixed("uint8[2, 3] has 6 bytes, not 5"));
        let free = |it: &mut PutRequest, dims: &[u64]| (it.crossing, it.dims) = (1, dims.to_vec());
        for dims in [&[u64::MAX, 2][..], &[7], &[1; 99]] {
            let reason = refused(put(&|it| free(it, dims)).await);
            assert!(reason.starts_with("crossing tensor \"free to part 0\": "), "{reason}");
        }

        // After all that, a tensor that fits is taken, once.
        put(&|_| {}).await.unwrap();
        put(&|it| free(it, &[6])).await.unwrap();
        assert_eq!(refused(put(&|_| {}).await), "tensor 0 of \"fixed to part 0\" came already");
        let reason = refused(put(&|it| it.sequence = 1).await);
        assert_eq!(reason, "step 10 of \"fixed to part 0\" came already, or a later step came before it");
        let reason = refused(put(&|it| it.sequence = 4).await);
        assert!(reason.starts_with("tensor 4 of \"fixed to part 0\" is too early"), "{reason}");
        end(client).await;
    });
    assert!(matches!(error.problem(), Problem::Version { .. }), "{error}");
}

/// The names of slots contain secrets.
#[test]
fn a_part_does_not_list_its_slots() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let status = runtime.block_on(async {
        let channel = Endpoint::from_shared(format!("http://{}", listener.address())).unwrap();
        let mut client = Grpc::new(channel.connect().await.unwrap());
        client.ready().await.unwrap();
        let codec = ProstCodec::<PutReply, PutReply>::default();
        let path = PathAndQuery::from_static("/tonic_rdma.tensor.v1.TensorDevice/Describe");
        client.unary(Request::new(PutReply {}), path, codec).await.unwrap_err()
    });
    assert_eq!(
        (status.code(), status.message()),
        (Code::PermissionDenied, "this tensor device does not list its regions and slots")
    );
}

#[test]
fn more_tensors_under_way_than_a_connection_carries_are_refused_by_name() {
    let mut graph = Topology::new();
    let mut parts = Vec::new();
    for pair in 0..64 {
        let fact = || Fact::known(Dtype::U8, &[1]);
        let outlet = Outlet { node: NodeId(2 * pair), output: 0 };
        for (part, role, inputs) in [(0, Role::Input, vec![]), (1, Role::Compute, vec![outlet])] {
            let (name, kind) = (format!("n{pair}.{part}"), "Test".to_owned());
            graph
                .add(Node { name, kind, role, inputs, outputs: vec![fact()], work: 1, stays: false })
                .unwrap();
            parts.push(Part(part));
        }
    }
    let placements = Arc::new(Placements::new(&graph, &Partition::new(&graph, 2, parts).unwrap()).unwrap());
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let peers = vec![listener.address().to_string(); 2];
    let peering = Peering::new(Part(0), peers, &graph, &placements).window(1024);
    let error = listener.connect(peering).unwrap_err().to_string();
    assert_eq!(
        error,
        "window: 64 crossing tensors go to part 1, and 1024 of each may be under way; mode grpc-tcp carries 65520 tensors at a time to a part"
    );
}
