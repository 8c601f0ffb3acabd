//! Calls of a caller that is no honest part.

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

use super::{Listener, Peering, Settings};
use crate::GraphError;
use crate::dataflow::{Dim, Fact, Node, NodeId, Outlet, Role, Topology};
use crate::placement::{Part, Partition, Placements, analyse};
use crate::transfer::Mode;
use crate::transfer::proto::parts_client::PartsClient;
use crate::transfer::proto::{Description, HelloReply, HelloRequest, PutReply, PutRequest, WatchRequest};

type Client = PartsClient<Channel>;

/// A graph whose node `fixed` sends six bytes, and whose node `free` sends any number, from part 1 to part 0; and one the other way.
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
    let placements = Arc::new(analyse(&graph, &partition).unwrap());
    (graph, placements)
}

/// Runs `calls` while part 0 connects. Returns how the connecting ended.
fn while_connecting<F: Future<Output = ()>>(calls: impl FnOnce(Client, HelloReply) -> F) -> GraphError {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (graph, placements) = graph();
    let listener = Listener::bind("127.0.0.1:0", Settings::default()).unwrap();
    let address = listener.address();
    // Bound, but not listening: part 1 can't be called.
    let absent = TcpSocket::new_v4().unwrap();
    absent.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let peers = vec![address.to_string(), absent.local_addr().unwrap().to_string()];
    let mut peering = Peering::new(Part(0), peers, &graph, &placements);
    peering.modes = vec![Mode::GrpcTcp, Mode::RdmaZerocp];
    peering.window = 2;
    // All calls have to be made within this time, also on a slow machine.
    peering.timeout = Duration::from_secs(10);
    let connecting = thread::spawn(move || listener.connect(peering).unwrap_err());
    runtime.block_on(async {
        let (client, server) = hello(address).await;
        calls(client, server).await;
    });
    connecting.join().unwrap()
}

/// Calls part 0 until it connects, with a description that does not fit.
async fn hello(address: SocketAddr) -> (Client, HelloReply) {
    let client = PartsClient::connect(format!("http://{address}")).await.unwrap();
    loop {
        // Part 7 does not exist, so that the difference is not that of part 1.
        let caller = Some(Description { version: 2, part: 7, ..Description::default() });
        match client.clone().hello(HelloRequest { caller, expected: 0 }).await {
            Ok(reply) => return (client, reply.into_inner()),
            Err(status) => assert_eq!(status.code(), Code::Unavailable, "{status}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Ends the connecting: part 1 speaks a version that does not exist.
async fn end(mut client: Client) {
    let caller = Some(Description { version: 9, part: 1, ..Description::default() });
    let reply = client.hello(HelloRequest { caller, expected: 0 }).await.unwrap().into_inner();
    assert!(reply.token.is_empty());
}

#[test]
fn another_version_is_named() {
    let error = while_connecting(|client, server| async move {
        assert_eq!(server.server.unwrap().version, 2);
        assert!(server.token.is_empty(), "no secret for a caller that runs something else");
        end(client).await;
    });
    assert!(matches!(error, GraphError::Version { peer: 1, ours: 2, theirs: 9, .. }), "{error}");
}

/// A process of an earlier run may call before the right one does.
#[test]
fn a_caller_that_fits_makes_up_for_one_that_does_not() {
    let error = while_connecting(|client, server| async move {
        let right = Description { part: 1, ..server.server.unwrap() };
        end(client.clone()).await;
        // Time in which part 0 could end for this reason.
        tokio::time::sleep(Duration::from_millis(500)).await;
        let hello = HelloRequest { caller: Some(right), expected: 0 };
        let token = client.clone().hello(hello).await.unwrap().into_inner().token;
        assert_eq!(token.len(), 16);
    });
    // The right part can't be called in this test.
    assert!(matches!(error, GraphError::Unreachable { peer: 1, .. }), "{error}");
}

#[test]
fn bad_calls_are_refused_by_name_and_harm_nothing() {
    let error = while_connecting(|client, server| async move {
        let caller = Description { part: 1, ..server.server.unwrap() };
        let greet = |caller: Option<Description>, expected| {
            let mut client = client.clone();
            async move { client.hello(HelloRequest { caller, expected }).await.map(tonic::Response::into_inner) }
        };
        let status = greet(None, 0).await.unwrap_err();
        assert_eq!(status.message(), "the caller does not describe itself");
        let long = Description { modes: vec![1; 65], ..caller.clone() };
        assert_eq!(greet(Some(long), 0).await.unwrap_err().message(), "the caller's description is too long");
        let third = Description { part: 2, ..caller.clone() };
        assert_eq!(greet(Some(third), 0).await.unwrap_err().message(), "there is no part 2");
        let same = Description { part: 0, ..caller.clone() };
        assert!(greet(Some(same), 0).await.unwrap().token.is_empty(), "no other process is part 0");
        assert!(greet(Some(caller.clone()), 1).await.unwrap().token.is_empty(), "this is not part 1");
        let token = greet(Some(caller.clone()), 0).await.unwrap().token;
        assert_eq!((token.len(), greet(Some(caller), 0).await.unwrap().token), (16, token.clone()));

        let status =
            client.clone().watch(WatchRequest { token: Bytes::from_static(&[0; 16]) }).await.unwrap_err();
        assert_eq!(status.message(), "the caller is no part of this session");

        let put = |change: &dyn Fn(&mut PutRequest)| {
            let content = Bytes::from_static(&[1, 2, 3, 4, 5, 6]);
            let (dtype, dims) = ("uint8".to_owned(), vec![2, 3]);
            let token = token.clone();
            let mut request =
                PutRequest { token, mode: 1, crossing: 0, sequence: 0, step: 10, dtype, dims, content };
            change(&mut request);
            let mut client = client.clone();
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
            // The sender takes it for the end of the part that it has talked to, which a mark would deny.
            let status = put(&|it| it.token = token.clone()).await.unwrap_err();
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
        // The third one goes the other way.
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

        // After all that, a right one has its place, once.
        put(&|_| {}).await.unwrap();
        put(&|it| free(it, &[6])).await.unwrap();
        assert_eq!(refused(put(&|_| {}).await), "tensor 0 of \"fixed to part 0\" came already");
        let reason = refused(put(&|it| it.sequence = 1).await);
        assert_eq!(reason, "step 10 of \"fixed to part 0\" came already, or a later step came before it");
        let reason = refused(put(&|it| it.sequence = 4).await);
        assert!(reason.starts_with("tensor 4 of \"fixed to part 0\" is too early"), "{reason}");
        end(client).await;
    });
    assert!(matches!(error, GraphError::Version { .. }), "{error}");
}

/// The names of slots contain secrets.
#[test]
fn a_part_does_not_list_its_slots() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let listener = Listener::bind("127.0.0.1:0", Settings::default()).unwrap();
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
    let placements = Arc::new(analyse(&graph, &Partition::new(&graph, 2, parts).unwrap()).unwrap());
    let listener = Listener::bind("127.0.0.1:0", Settings::default()).unwrap();
    let peers = vec![listener.address().to_string(); 2];
    let mut peering = Peering::new(Part(0), peers, &graph, &placements);
    peering.window = 1024;
    let error = listener.connect(peering).unwrap_err().to_string();
    assert_eq!(
        error,
        "window: 64 crossing tensors go to part 1, and 1024 of each may be under way; mode grpc-tcp carries 65520 tensors at a time to a part"
    );
}
