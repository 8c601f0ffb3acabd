//! Buffers by reference: leases, handles and fetches, over each path.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use support::{Content, Runtime, until, within};
use tonic::service::InterceptorLayer;
use tonic::transport::Server;
use tonic_rdma::{
    Config, Policy, RdmaChannel, RdmaConnectInfo, RdmaIncoming, RdmaRequestExt as _, RdmaServer, Verdict,
};
use tonic_rdma_tensor::buffer::{
    BufferClient, BufferClientBuilder, BufferPool, LeaseOptions, ReaderSecret, RemoteBuffer,
};
use tonic_rdma_tensor::unstable::buffer_proto::buffers_client::BuffersClient;
use tonic_rdma_tensor::unstable::buffer_proto::buffers_server::{Buffers, BuffersServer};
use tonic_rdma_tensor::unstable::buffer_proto::{
    BufferKey, BufferRanges, Fault, FaultKind, FetchReply, FetchRequest, WriteReply, WriteRequest,
};
use tonic_rdma_tensor::{Dtype, MemRegion, Shape, Tensor, TensorError, TensorErrorKind, TensorSpec};

/// What carries a fetch.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Path {
    Process,
    Native,
    Http2,
    Tcp,
}

const PATHS: [Path; 4] = [Path::Process, Path::Native, Path::Http2, Path::Tcp];

fn content(seed: u64, length: usize) -> Vec<u8> {
    Content::new(seed).take(length)
}

/// Returns the configuration of both ends.
fn config(path: Path) -> Config {
    let policy = if path == Path::Tcp { Policy::TcpOnly } else { Policy::Prefer };
    Config::from_env().unwrap().policy(policy)
}

/// Starts an owner, and returns its pool with settings of a reader over `path`.
async fn owner(path: Path) -> (BufferPool, BufferClientBuilder) {
    let config = config(path);
    let incoming = RdmaIncoming::builder().config(config.clone()).bind("127.0.0.1:0").await.unwrap();
    let pool = BufferPool::new(format!("http://{}", incoming.local_addr())).unwrap();
    let service = pool.service();
    match path {
        Path::Http2 | Path::Tcp => {
            tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
        }
        _ => {
            tokio::spawn(RdmaServer::new().add_service(service).serve_with_incoming(incoming));
        }
    }
    let reader = BufferClient::builder().config(config);
    (pool, if path == Path::Process { reader } else { reader.calls_itself() })
}

/// Runs a test over each path.
fn over_each<F: Future<Output = ()>>(test: impl Fn(Path) -> F) {
    for path in PATHS {
        Runtime::MultiThread.run(within(test(path)));
    }
}

fn key(handle: &RemoteBuffer) -> BufferKey {
    let RemoteBuffer { generation, id, ref token, .. } = *handle;
    BufferKey { generation, id, token: token.clone() }
}

fn kind<T: std::fmt::Debug>(result: Result<T, TensorError>) -> TensorErrorKind {
    result.unwrap_err().kind()
}

#[test]
fn bytes_of_each_length_are_fetched_as_they_were_shared() {
    over_each(async |path| {
        let (pool, reader) = owner(path).await;
        let reader = reader.landing_budget(8 << 20).build();
        for length in [0, 1, 4095, 4096, 100_000, 1 << 20, (4 << 20) + 1, 9 << 20] {
            let expected = content(length as u64, length);
            let (lease, handle) = pool.share(expected.clone()).unwrap();
            assert_eq!(reader.fetch(&handle).await.unwrap(), expected, "{length} bytes over {path:?}");
            drop(lease);
            assert_eq!(kind(reader.fetch(&handle).await), TensorErrorKind::Gone);
        }
        let owners = reader.owners();
        match path {
            Path::Process => assert!(owners.is_empty()),
            path => {
                let info = owners[0].connection.as_ref().unwrap();
                assert_eq!(info.is_native(), path == Path::Native, "{}", info.reason());
                let over_tcp = info.verdict() == Verdict::Tcp;
                assert_eq!(over_tcp, path == Path::Tcp, "{}", info.reason());
            }
        }
    });
}

#[test]
fn memory_of_a_pool_is_neither_copied_by_the_owner_nor_by_a_native_reader() {
    Runtime::MultiThread.run(within(async {
        let incoming = RdmaIncoming::bind("127.0.0.1:0").await.unwrap();
        let pool = BufferPool::new(format!("http://{}", incoming.local_addr())).unwrap();
        let served = Arc::new(Mutex::new(None::<RdmaConnectInfo>));
        let seen = Arc::clone(&served);
        let note = move |request: tonic::Request<()>| {
            *seen.lock().unwrap() = request.connection().cloned();
            Ok::<_, tonic::Status>(request)
        };
        let server = RdmaServer::new().layer(InterceptorLayer::new(note)).add_service(pool.service());
        tokio::spawn(server.serve_with_incoming(incoming));
        let reader = BufferClient::builder().calls_itself().build();
        let mut memory = pool.allocate(1 << 20).unwrap();
        memory.copy_from_slice(&content(3, 1 << 20));
        let bytes = memory.freeze();
        let (lease, handle) = pool.share(bytes.clone()).unwrap();
        assert_eq!(lease.bytes().unwrap().as_ptr(), bytes.as_ptr());
        assert_eq!(reader.fetch(&handle).await.unwrap(), bytes);
        assert_eq!(pool.statistics().copied_bytes, 0);
        let blocks: Vec<_> = (0..200).map(|block| block * 5000..block * 5000 + 4096).collect();
        let fetched = reader.fetch_blocks(&handle, &blocks).await.unwrap();
        assert!(
            fetched
                .iter()
                .zip(&blocks)
                .all(|(it, range)| *it == bytes[range.start as usize..range.end as usize])
        );
        let counters = reader.owners()[0].connection.as_ref().unwrap().counters();
        assert_eq!(counters.landed_copied_bytes + counters.landed_moved_bytes, 0);
        let owned = served.lock().unwrap().clone().unwrap().counters();
        assert_eq!((owned.offered_copied_bytes, owned.offered_in_place_bytes), (0, (1 << 20) + 200 * 4096));
        let (_lease, _) = pool.share(vec![1; 5000]).unwrap();
        assert_eq!(pool.statistics().copied_bytes, 5000);
    }));
}

#[test]
fn ranges_come_into_memory_of_the_reader_and_as_blocks() {
    over_each(async |path| {
        let (pool, reader) = owner(path).await;
        let reader = reader.build();
        let all = content(5, 3 << 20);
        let (_lease, handle) = pool.share(all.clone()).unwrap();
        let mut region = MemRegion::allocate(1 << 20, &tonic_rdma::memory::Budget::new(1 << 21)).unwrap();
        reader.fetch_into(&handle, &mut region, 12345..12345 + (1 << 20)).await.unwrap();
        assert_eq!(region[..], all[12345..12345 + (1 << 20)]);
        let mut random = fastrand::Rng::with_seed(7);
        let blocks: Vec<Range<u64>> = (0..500)
            .map(|_| {
                let start = random.u64(0..3 << 20);
                start..(start + random.u64(0..20_000)).min(3 << 20)
            })
            .collect();
        let fetched = reader.fetch_blocks(&handle, &blocks).await.unwrap();
        for (range, block) in blocks.iter().zip(&fetched) {
            assert_eq!(block[..], all[range.start as usize..range.end as usize]);
        }
        for wrong in [0..(3 << 20) + 1, 5..u64::MAX, u64::MAX - 1..u64::MAX] {
            let result = reader.fetch_blocks(&handle, &[0..1, wrong]).await;
            assert_eq!(kind(result), TensorErrorKind::InvalidArgument);
        }
        assert_eq!(
            kind(reader.fetch_into(&handle, &mut [0; 3], 0..4).await),
            TensorErrorKind::InvalidArgument
        );
    });
}

#[test]
fn many_buffers_of_several_owners_have_a_result_each() {
    over_each(async |path| {
        let (one, reader) = owner(path).await;
        let (other, _) = owner(path).await;
        let reader = reader.build();
        let mut shared: Vec<_> = (0..400)
            .map(|number| {
                let pool = if number % 3 == 0 { &one } else { &other };
                let (lease, handle) = pool.share(content(number, 1000 + 37 * number as usize)).unwrap();
                (Some(lease), handle)
            })
            .collect();
        shared.iter_mut().step_by(5).for_each(|(lease, _)| drop(lease.take()));
        shared.iter().skip(1).step_by(5).for_each(|(lease, _)| lease.as_ref().unwrap().revoke());
        let handles: Vec<_> = shared.iter().map(|(_, handle)| handle.clone()).collect();
        for (number, result) in reader.fetch_all(&handles).await.into_iter().enumerate() {
            match number % 5 {
                0 => assert_eq!(kind(result), TensorErrorKind::Gone),
                1 => assert_eq!(kind(result), TensorErrorKind::Revoked),
                _ => assert_eq!(result.unwrap(), content(number as u64, 1000 + 37 * number)),
            }
        }
    });
}

#[test]
fn tensors_keep_their_type_and_shape_and_checksums_are_compared() {
    over_each(async |path| {
        let (pool, reader) = owner(path).await;
        let reader = reader.build();
        let spec = TensorSpec::new(Dtype::F32, Shape::new(&[64, 100]).unwrap()).unwrap();
        let tensor = Tensor::copy_from(spec, &content(2, 25_600)).unwrap();
        let (_lease, handle) =
            pool.share_tensor(&tensor.transpose(), LeaseOptions::new().checksum()).unwrap();
        let fetched = reader.fetch_tensor(&handle).await.unwrap();
        assert_eq!(fetched.shape().dims(), [100, 64]);
        assert_eq!(fetched.bytes().unwrap(), tensor.transpose().to_contiguous().unwrap().bytes().unwrap());
        let mut wrong = handle.clone();
        wrong.xxh3 = wrong.xxh3.map(|sum| sum ^ 1);
        assert_eq!(kind(reader.fetch(&wrong).await), TensorErrorKind::Protocol);
        wrong.shape = vec![3];
        assert_eq!(kind(reader.fetch_tensor(&wrong).await), TensorErrorKind::InvalidArgument);
        wrong.dtype = "float31".into();
        assert_eq!(kind(reader.fetch_tensor(&wrong).await), TensorErrorKind::InvalidArgument);
        let (_lease, bytes) = pool.share(vec![1]).unwrap();
        assert_eq!(kind(reader.fetch_tensor(&bytes).await), TensorErrorKind::InvalidArgument);
    });
}

#[test]
fn writes_are_seen_whole_or_not_at_all() {
    over_each(async |path| {
        let (pool, reader) = owner(path).await;
        let reader = reader.build();
        let length = 3 << 20;
        let (lease, handle) = pool.share_with(vec![0; length], LeaseOptions::new().writable()).unwrap();
        let ends = Arc::new(AtomicBool::new(false));
        let looks = tokio::spawn({
            let (reader, handle, ends) = (reader.clone(), handle.clone(), Arc::clone(&ends));
            async move {
                while !ends.load(Ordering::SeqCst) {
                    let seen = reader.fetch(&handle).await.unwrap();
                    assert!(seen.iter().all(|byte| *byte == seen[0]), "bytes of two writes");
                }
            }
        });
        for written in 1..=8_u8 {
            reader.write_back(&handle, 0, vec![written; length]).await.unwrap();
            assert_eq!(reader.fetch(&handle).await.unwrap(), vec![written; length], "no old bytes");
        }
        ends.store(true, Ordering::SeqCst);
        looks.await.unwrap();
        reader.write_back(&handle, 100, vec![9; 50]).await.unwrap();
        let seen = reader.fetch(&handle).await.unwrap();
        assert!(
            seen[..100] == [8; 100] && seen[100..150] == [9; 50] && seen[150..].iter().all(|&it| it == 8)
        );
        assert_eq!((lease.writes(), lease.written(8).await.unwrap()), (9, 9));
        assert_eq!(lease.bytes().unwrap(), seen);
        let result = reader.write_back(&handle, length as u64 - 1, vec![1; 2]).await;
        assert_eq!(kind(result), TensorErrorKind::InvalidArgument);
        let (_lease, fixed) = pool.share(vec![0; 10]).unwrap();
        assert_eq!(kind(reader.write_back(&fixed, 0, vec![1]).await), TensorErrorKind::NotPermitted);
    });
}

#[test]
fn a_lease_ends_by_its_time_its_readers_and_its_owner() {
    over_each(async |path| {
        let (pool, reader) = owner(path).await;
        let reader = reader.build();
        let options = LeaseOptions::new().time_limit(Duration::from_millis(1));
        let (lease, handle) = pool.share_with(vec![1; 9000], options).unwrap();
        lease.ended().await;
        assert_eq!(kind(reader.fetch(&handle).await), TensorErrorKind::Gone);

        for length in [0, 9000, 1 << 20, 2 << 20] {
            let (lease, handle) = pool.share_with(vec![2; length], LeaseOptions::new().readers(3)).unwrap();
            lease.detach().unwrap();
            for _ in 0..3 {
                assert_eq!(reader.fetch(&handle).await.unwrap(), vec![2; length]);
            }
            assert_eq!(
                kind(reader.fetch(&handle).await),
                TensorErrorKind::Gone,
                "{length} bytes over {path:?}"
            );
        }
        let blocks: Vec<_> = (0..120).map(|block| block * 100..block * 100 + 50).collect();
        let (_lease, handle) = pool.share_with(vec![4; 12_000], LeaseOptions::new().readers(1)).unwrap();
        assert_eq!(reader.fetch_blocks(&handle, &blocks).await.unwrap().len(), 120);
        assert_eq!(kind(reader.fetch_blocks(&handle, &blocks).await), TensorErrorKind::Gone);

        let (lease, handle) = pool.share(vec![3; 9000]).unwrap();
        let lease = lease.detach().unwrap_err();
        reader.fetch(&handle).await.unwrap();
        lease.revoke();
        assert_eq!(kind(reader.fetch(&handle).await), TensorErrorKind::Revoked);
        assert!(lease.bytes().is_none());
        until(|| lease.running() == 0).await;
        let readers = lease.readers();
        assert_eq!((readers.len(), readers[0].complete, readers[0].bytes), (1, 1, 9000));
        assert_eq!(readers[0].address.is_none(), path == Path::Process);
        drop(lease);
        assert_eq!(kind(reader.fetch(&handle).await), TensorErrorKind::Revoked, "it stays revoked");

        let (lease, handle) = pool.share(vec![5; 9000]).unwrap();
        let waits = async { tokio::join!(lease.ended(), async { lease.close() }) };
        waits.await;
        assert_eq!(kind(reader.fetch(&handle).await), TensorErrorKind::Gone);

        let (left, of_left) = pool.share_with(vec![6; 9000], LeaseOptions::new().readers(9)).unwrap();
        left.detach().unwrap();
        let (lease, handle) = pool.share(vec![7; 9000]).unwrap();
        pool.close();
        for handle in [handle, of_left] {
            assert_eq!(kind(reader.fetch(&handle).await), TensorErrorKind::Gone, "the service is there");
        }
        assert!(lease.bytes().is_none() && pool.statistics().leases == 0);
    });
}

#[test]
fn a_handle_gives_nothing_without_its_token_its_name_or_its_pool() {
    over_each(async |path| {
        let (pool, reader) = owner(path).await;
        let alice = pool.admit("alice").unwrap();
        let bob = pool.admit("bob").unwrap();
        let (_lease, handle) =
            pool.share_with(vec![1; 9000], LeaseOptions::new().only_for(["alice", "carol"])).unwrap();
        let stranger = reader.build();
        assert_eq!(kind(stranger.fetch(&handle).await), TensorErrorKind::NotPermitted);
        let named = async |secret: &ReaderSecret| {
            let reader = BufferClient::builder().config(config(path)).secret(secret.clone());
            let reader = if path == Path::Process { reader } else { reader.calls_itself() };
            reader.build().fetch(&handle).await
        };
        assert_eq!(named(&alice).await.unwrap(), vec![1; 9000]);
        assert_eq!(kind(named(&bob).await), TensorErrorKind::NotPermitted);
        let forged = ReaderSecret::new(&handle.owner, "alice", &bob.to_bytes()).unwrap();
        assert_eq!(kind(named(&forged).await), TensorErrorKind::NotPermitted);
        let elsewhere = ReaderSecret::new("http://ps0:1", "alice", &alice.to_bytes()).unwrap();
        assert_eq!(kind(named(&elsewhere).await), TensorErrorKind::NotPermitted, "it is not sent here");
        let again = ReaderSecret::new(&handle.owner, "alice", &alice.to_bytes()).unwrap();
        named(&again).await.unwrap();
        pool.dismiss("alice");
        assert_eq!(kind(named(&alice).await), TensorErrorKind::NotPermitted);

        let (_lease, handle) = pool.share(vec![1; 9000]).unwrap();
        let wrong = |change: fn(&mut RemoteBuffer)| {
            let mut handle = handle.clone();
            change(&mut handle);
            handle
        };
        let cases: [(fn(&mut RemoteBuffer), _); 6] = [
            (|handle| handle.token = vec![0; 16].into(), TensorErrorKind::NotPermitted),
            (|handle| handle.token = Bytes::new(), TensorErrorKind::InvalidArgument),
            (|handle| handle.token = vec![0; 1 << 20].into(), TensorErrorKind::InvalidArgument),
            (|handle| handle.id = u64::MAX, TensorErrorKind::Gone),
            (|handle| handle.length += 1, TensorErrorKind::InvalidArgument),
            (|handle| handle.length = u64::MAX, TensorErrorKind::InvalidArgument),
        ];
        for (number, (change, expected)) in cases.into_iter().enumerate() {
            let error = stranger.fetch(&wrong(change)).await.unwrap_err();
            assert_eq!(error.kind(), expected, "case {number}: {error}");
        }
        let foreign = wrong(|handle| handle.generation ^= 1);
        assert_eq!(kind(stranger.fetch(&foreign).await), TensorErrorKind::Restarted);
        let nobody = wrong(|handle| (handle.generation, handle.owner) = (1, "http://127.0.0.1:1".into()));
        assert_eq!(kind(stranger.fetch(&nobody).await), TensorErrorKind::PeerLost);
        let odd = wrong(|handle| (handle.generation, handle.owner) = (1, "no uri".into()));
        assert_eq!(kind(stranger.fetch(&odd).await), TensorErrorKind::InvalidArgument);
        assert!(!format!("{handle:?}").contains("token"), "{handle:?}");
    });
}

#[test]
fn a_reader_connects_to_allowed_owners_alone_and_closes_idle_connections() {
    Runtime::MultiThread.run(within(async {
        let (pool, reader) = owner(Path::Native).await;
        let (_lease, handle) = pool.share(vec![1; 9000]).unwrap();
        let strict = reader.owners(|uri| uri.host() == Some("ps0")).build();
        assert_eq!(kind(strict.fetch(&handle).await), TensorErrorKind::NotPermitted);
        let (pool, reader) = owner(Path::Native).await;
        let (_lease, handle) = pool.share(vec![1; 9000]).unwrap();
        let reader = reader.idle(Duration::from_millis(20)).build();
        reader.fetch(&handle).await.unwrap();
        until(|| reader.owners().is_empty()).await;
        reader.fetch(&handle).await.unwrap();
        let small = BufferClient::builder().landing_budget(1 << 20).calls_itself().build();
        let (_lease, large) = pool.share(content(6, 5 << 20)).unwrap();
        assert_eq!(small.fetch(&large).await.unwrap(), content(6, 5 << 20));
        let limited = BufferClient::builder().max_fetch_bytes(8999).build();
        let error = limited.fetch(&handle).await.unwrap_err();
        assert!(error.reason().contains("max_fetch_bytes"), "{error}");
        assert!(limited.fetch_all(&[handle]).await.remove(0).is_err());
    }));
}

#[test]
fn odd_requests_are_refused_by_name() {
    Runtime::MultiThread.run(within(async {
        let (pool, _) = owner(Path::Native).await;
        let (_lease, handle) = pool.share(vec![1; 9000]).unwrap();
        let mut client = BuffersClient::connect(handle.owner.clone()).await.unwrap();
        let key = key(&handle);
        let ranges =
            |offsets: Vec<u64>, lengths: Vec<u64>| BufferRanges { key: Some(key.clone()), offsets, lengths };
        for buffers in [
            vec![ranges(vec![0], vec![])],
            vec![ranges(vec![0; 65_537], vec![1; 65_537])],
            (0..65_537).map(|_| BufferRanges::default()).collect(),
        ] {
            let request = FetchRequest { buffers, ..FetchRequest::default() };
            let refused = client.fetch(request).await.unwrap_err();
            assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{refused}");
        }
        let buffers = vec![BufferRanges::default(), ranges(vec![8990], vec![10])];
        let request = FetchRequest { buffers, ..FetchRequest::default() };
        let mut replies = client.fetch(request).await.unwrap().into_inner();
        let reply = replies.message().await.unwrap().unwrap();
        assert!(reply.fault.unwrap().reason.contains("names no buffer"));
        assert_eq!(replies.message().await.unwrap().unwrap().contents, [vec![1; 10]]);
        for owner in
            ["ps0:50051", "/a b", "http://0.0.0.0:50051", "http://[::]:50051", "http://ps0:0", "http://:1"]
        {
            assert_eq!(kind(BufferPool::new(owner)), TensorErrorKind::InvalidSetting, "{owner}");
        }
    }));
}

#[test]
fn readers_of_one_client_share_a_connection_which_is_made_once() {
    Runtime::MultiThread.run(async {
        let (pool, reader) = owner(Path::Native).await;
        let (lease, handle) = pool.share(vec![1; 9000]).unwrap();
        let reader = reader.build();
        let fetches: tokio::task::JoinSet<_> = (0..20)
            .map(|_| {
                let (reader, handle) = (reader.clone(), handle.clone());
                async move { reader.fetch(&handle).await.unwrap() }
            })
            .collect();
        assert!(fetches.join_all().await.iter().all(|bytes| bytes == &vec![1; 9000]));
        assert_eq!(lease.readers().len(), 1);
    });
}

#[test]
fn an_owner_with_tls_is_read_over_tls() {
    Runtime::MultiThread.run(async {
        let authority = support::Authority::new("owners");
        let incoming = RdmaIncoming::bind("127.0.0.1:0").await.unwrap();
        let port = incoming.local_addr().port();
        let pool = BufferPool::new(format!("https://localhost:{port}")).unwrap();
        let mut server = Server::builder().tls_config(authority.server()).unwrap();
        tokio::spawn(server.add_service(pool.service()).serve_with_incoming(incoming));
        let (_lease, handle) = pool.share(content(4, 2 << 20)).unwrap();
        let reader = BufferClient::builder().calls_itself();
        assert_eq!(
            reader.client_tls(authority.client()).build().fetch(&handle).await.unwrap(),
            content(4, 2 << 20)
        );
        let reader = BufferClient::builder().calls_itself().build();
        assert!(reader.fetch(&handle).await.is_err(), "no certificate to trust");
    });
}

#[test]
fn a_fetch_whose_lease_is_revoked_after_the_first_message_ends_there() {
    for path in [Path::Native, Path::Http2, Path::Tcp] {
        Runtime::MultiThread.run(async {
            let (pool, _) = owner(path).await;
            {
                let (lease, handle) = pool.share(vec![5; 64 << 20]).unwrap();
                let endpoint = tonic::transport::Endpoint::from_shared(handle.owner.clone()).unwrap();
                let channel = RdmaChannel::builder(endpoint).config(config(path)).connect().await.unwrap();
                let mut client = BuffersClient::new(channel).max_decoding_message_size(usize::MAX);
                let (offsets, lengths) = ((0..64).map(|mib| mib << 20).collect(), vec![1 << 20; 64]);
                let buffers = vec![BufferRanges { key: Some(key(&handle)), offsets, lengths }];
                let request = FetchRequest { buffers, reply_bytes: 1 << 20, reader: None };
                let mut replies = client.fetch(request).await.unwrap().into_inner();
                replies.message().await.unwrap().unwrap();
                assert_eq!(lease.running(), 1);
                lease.revoke();
                let mut last = None;
                while let Some(reply) = replies.message().await.unwrap() {
                    last = Some(reply);
                }
                assert_eq!(last.unwrap().fault.unwrap().kind(), FaultKind::Revoked, "{path:?}");
                lease.ended().await;
            }
        });
    }
}

/// An owner that answers a fetch with these replies.
struct Scripted(Vec<FetchReply>);

#[tonic::async_trait]
impl Buffers for Scripted {
    type FetchStream = tokio_stream::Iter<std::vec::IntoIter<Result<FetchReply, tonic::Status>>>;

    async fn fetch(
        &self,
        _: tonic::Request<FetchRequest>,
    ) -> Result<tonic::Response<Self::FetchStream>, tonic::Status> {
        let replies: Vec<_> = self.0.iter().cloned().map(Ok).collect();
        Ok(tonic::Response::new(tokio_stream::iter(replies)))
    }

    async fn write(
        &self,
        _: tonic::Request<tonic::Streaming<WriteRequest>>,
    ) -> Result<tonic::Response<WriteReply>, tonic::Status> {
        Err(tonic::Status::internal("not in this test"))
    }
}

#[test]
fn an_owner_that_sends_other_bytes_than_asked_for_is_refused() {
    Runtime::MultiThread.run(async {
        let reply = |contents: &[usize], fault: Option<u32>| FetchReply {
            contents: contents.iter().map(|length| vec![1; *length].into()).collect(),
            fault: fault.map(|buffer| Fault { buffer, kind: 1, reason: "it says so".into() }),
        };
        let (gone, wrong) = (TensorErrorKind::Gone, TensorErrorKind::Protocol);
        for (replies, first, second) in [
            (vec![reply(&[100, 100], None)], None, None),
            (vec![reply(&[60], None), reply(&[40, 30], None), reply(&[70], None)], None, None),
            (vec![reply(&[100, 5], Some(1))], None, Some(gone)),
            (vec![reply(&[], Some(0)), reply(&[100], None)], Some(gone), None),
            (vec![reply(&[], Some(0)), reply(&[], Some(1))], Some(gone), Some(gone)),
            (vec![], Some(wrong), Some(wrong)),
            (vec![reply(&[100], None)], Some(wrong), Some(wrong)),
            (vec![reply(&[100, 101], None)], Some(wrong), Some(wrong)),
            (vec![reply(&[100, 100, 1], None)], Some(wrong), Some(wrong)),
            (vec![reply(&[150, 50], None)], Some(wrong), Some(wrong)),
            (vec![reply(&[100, 0, 100], None)], Some(wrong), Some(wrong)),
            (vec![reply(&[], None), reply(&[100, 100], None)], Some(wrong), Some(wrong)),
            (vec![reply(&[100, 100], None), reply(&[], None)], Some(wrong), Some(wrong)),
            (vec![reply(&[100, 100], Some(1 << 20))], Some(wrong), Some(wrong)),
            (vec![reply(&[], Some(1))], Some(wrong), Some(wrong)),
            (vec![reply(&[], Some(0)), reply(&[], Some(0))], Some(wrong), Some(wrong)),
        ] {
            let incoming = RdmaIncoming::bind("127.0.0.1:0").await.unwrap();
            let owner = format!("http://{}", incoming.local_addr());
            let service = BuffersServer::new(Scripted(replies.clone()));
            tokio::spawn(RdmaServer::new().add_service(service).serve_with_incoming(incoming));
            let token = Bytes::from_static(&[0; 16]);
            let handle = RemoteBuffer { owner, length: 100, token, ..RemoteBuffer::default() };
            let results = BufferClient::builder().build().fetch_all(&[handle.clone(), handle]).await;
            let kinds: Vec<_> = results.iter().map(|it| it.as_ref().err().map(TensorError::kind)).collect();
            assert_eq!(kinds, [first, second], "{replies:?}: {results:?}");
        }
    });
}

#[test]
fn leases_end_in_the_order_of_their_time_limits_and_numbers_are_used_once() {
    Runtime::MultiThread.run(async {
        let (pool, reader) = owner(Path::Process).await;
        let reader = reader.build();
        let after = |millis| LeaseOptions::new().time_limit(Duration::from_millis(millis));
        let (long, _) = pool.share_with(vec![1], after(3_600_000)).unwrap();
        let (late, _) = pool.share_with(vec![1], after(20)).unwrap();
        let (soon, _) = pool.share_with(vec![1], after(1)).unwrap();
        soon.ended().await;
        late.ended().await;
        assert!(long.bytes().is_some());
        let (revoked, first) = pool.share(vec![1]).unwrap();
        revoked.revoke();
        for number in 0..5000 {
            let expected = if number <= 4095 { TensorErrorKind::Revoked } else { TensorErrorKind::Gone };
            assert_eq!(kind(reader.fetch(&first).await), expected, "after {number} other leases");
            drop(pool.share(vec![1]).unwrap());
        }
        let (_lease, again) = pool.share(vec![2]).unwrap();
        assert_eq!(again.id, first.id + 5001);
        assert_eq!(pool.statistics().leases, 2);
        drop(pool);
    });
}

#[test]
fn a_fetch_that_fails_is_no_reader_and_others_are_told_to_wait() {
    Runtime::MultiThread.run(async {
        let (pool, reader) = owner(Path::Tcp).await;
        let reader = reader.build();
        let (_lease, handle) = pool.share_with(vec![1; 32 << 20], LeaseOptions::new().readers(1)).unwrap();
        let mut client = BuffersClient::connect(handle.owner.clone()).await.unwrap();
        let buffers =
            vec![BufferRanges { key: Some(key(&handle)), offsets: vec![0], lengths: vec![32 << 20] }];
        let request = FetchRequest { buffers, ..FetchRequest::default() };
        let replies = client.fetch(request).await.unwrap();
        assert_eq!(kind(reader.fetch(&handle).await), TensorErrorKind::Busy);
        drop((replies, client));
        while let Err(error) = reader.fetch(&handle).await {
            assert_eq!(error.kind(), TensorErrorKind::Busy, "{error}");
        }
        assert_eq!(kind(reader.fetch(&handle).await), TensorErrorKind::Gone);
    });
}

#[test]
fn a_lease_that_is_revoked_in_the_middle_of_a_fetch_gives_all_bytes_or_none() {
    over_each(async |path| {
        let (pool, reader) = owner(path).await;
        let reader = reader.build();
        let all = content(11, 4 << 20);
        for round in 0..20 {
            let (lease, handle) = pool.share(all.clone()).unwrap();
            let revoke = async {
                for _ in 0..round {
                    tokio::task::yield_now().await;
                }
                lease.revoke();
                lease.ended().await;
            };
            match tokio::join!(reader.fetch(&handle), revoke).0 {
                Ok(bytes) => assert!(bytes == all, "other bytes"),
                Err(error) => assert_eq!(error.kind(), TensorErrorKind::Revoked, "{error}"),
            }
        }
    });
}

#[test]
fn an_empty_buffer_is_fetched_and_written() {
    over_each(async |path| {
        let (pool, reader) = owner(path).await;
        let reader = reader.build();
        let (_lease, handle) = pool.share_with(Bytes::new(), LeaseOptions::new().writable()).unwrap();
        reader.write_back(&handle, 0, Bytes::new()).await.unwrap();
        assert!(reader.fetch(&handle).await.unwrap().is_empty());
        let (lease, handle) = pool.share_with(Bytes::new(), LeaseOptions::new().readers(0)).unwrap();
        assert_eq!(kind(reader.fetch(&handle).await), TensorErrorKind::Gone);
        lease.ended().await;
    });
}

/// Owners share, drop and share again in memory that the pool uses again, while readers fetch. Each buffer has
/// content of its own, which depends on the number in its first eight bytes.
#[test]
fn a_handle_of_memory_that_is_used_again_never_gives_other_bytes() {
    const LENGTH: usize = 4096;
    over_each(async |path| {
        let lost = AtomicU64::new(0);
        // The nightly run has more.
        let races = std::env::var("BUFFER_RACES").map_or(4000, |text| text.parse().unwrap());
        let (pool, reader) = owner(path).await;
        let (reader, count) = (reader.build(), AtomicU64::new(0));
        let race = async |racer: u64| {
            let mut random = fastrand::Rng::with_seed(racer);
            while count.fetch_add(1, Ordering::Relaxed) < races {
                let seed = random.u64(..);
                let mut memory = pool.allocate(LENGTH).unwrap();
                memory.chunks_exact_mut(8).enumerate().for_each(|(index, word)| {
                    word.copy_from_slice(&(seed ^ index as u64).to_le_bytes());
                });
                let (lease, handle) = pool.share(memory.freeze()).unwrap();
                let fetched = async {
                    let fetched = reader.fetch(&handle).await;
                    if let Ok(bytes) = &fetched {
                        bytes.chunks_exact(8).enumerate().for_each(|(index, word)| {
                            assert_eq!(word, (seed ^ index as u64).to_le_bytes(), "bytes of another buffer");
                        });
                    }
                    fetched
                };
                let ends = async {
                    for _ in 0..random.u8(..6) {
                        tokio::task::yield_now().await;
                    }
                    if seed.is_multiple_of(2) { lease.revoke() } else { drop(lease) }
                };
                let (fetched, ()) = tokio::join!(fetched, ends);
                let expected =
                    if seed.is_multiple_of(2) { TensorErrorKind::Revoked } else { TensorErrorKind::Gone };
                if let Err(error) = fetched {
                    assert_eq!(error.kind(), expected, "{error}");
                    lost.fetch_add(1, Ordering::Relaxed);
                }
            }
        };
        tokio::join!(race(1), race(2), race(3), race(4));
        // In the owner's process a fetch does not wait, so it ends before the lease.
        assert!(
            path == Path::Process || lost.into_inner() > 0,
            "no lease ended before its fetch over {path:?}"
        );
    });
}
