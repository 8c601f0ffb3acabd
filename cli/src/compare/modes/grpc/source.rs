//! The service that answers with payloads: the server half of `--direction down`.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tonic::{Request, Response, Status};
use tonic_rdma_proto::transfer::source_server::{Source, SourceServer};
use tonic_rdma_proto::transfer::{GetReply, GetRequest};

use super::registered::RegisteredContent;
use tonic_rdma_payload::content::{Content, VARIANTS, offset_of, variant_seed};

/// Keeps the content of a cell, and cuts each answer from it. Clones share the content.
#[derive(Clone, Debug, Default)]
pub(crate) struct SourceService {
    made: Arc<Mutex<Option<CachedContent>>>,
    /// Whether the content lies in registered memory.
    registers: bool,
}

/// Content, with the origin and the size that it was made for.
#[derive(Debug)]
struct CachedContent {
    origin: u64,
    bytes: usize,
    content: SourceContent,
}

#[derive(Debug)]
enum SourceContent {
    Ordinary(Content),
    Registered(RegisteredContent),
}

impl SourceService {
    /// Makes a service whose payloads are sent from registered memory.
    pub(crate) fn registering() -> Self {
        Self { registers: true, ..Self::default() }
    }

    /// Returns the service as a tonic server without limits on message sizes.
    pub(crate) fn server(self) -> SourceServer<Self> {
        SourceServer::new(self).max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX)
    }

    /// Returns the payload of `seed`, a variant of the content of `origin`. The first call for a content makes it.
    /// Further calls cost a reference count.
    fn payload(&self, origin: u64, seed: u64, bytes: u64) -> Result<Bytes, Status> {
        let no_memory = || Status::resource_exhausted(format!("there is no memory for {bytes} bytes"));
        let bytes = usize::try_from(bytes).map_err(|_| no_memory())?;
        if !(0..VARIANTS).any(|variant| variant_seed(origin, variant) == seed) {
            return Err(Status::invalid_argument("the seed is of another content"));
        }
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let made = match &mut *made {
            Some(made) if (made.origin, made.bytes) == (origin, bytes) => made,
            other => {
                // The memory of the last content is freed first.
                *other = None;
                let content = if self.registers {
                    let room = usize::try_from(Content::with_variants(bytes as u64));
                    let made = RegisteredContent::new(room.map_err(|_| no_memory())?, origin);
                    SourceContent::Registered(made.map_err(|_| no_memory())?)
                } else {
                    SourceContent::Ordinary(Content::new(bytes, origin).map_err(|_| no_memory())?)
                };
                other.insert(CachedContent { origin, bytes, content })
            }
        };
        Ok(match &made.content {
            SourceContent::Ordinary(content) => content.at(offset_of(seed, origin) as usize).cut(bytes),
            SourceContent::Registered(content) => content.cut(seed, bytes),
        })
    }
}

#[tonic::async_trait]
impl Source for SourceService {
    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetReply>, Status> {
        let GetRequest { origin, seed, bytes } = request.into_inner();
        Ok(Response::new(GetReply { payload: self.payload(origin, seed, bytes)? }))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use tonic::Code;
    use tonic::transport::Server;
    use tonic_rdma_proto::transfer::Check;
    use tonic_rdma_proto::transfer::turns_server::TurnsServer;

    use super::super::client::GrpcCaller;
    use super::super::connect;
    use super::super::service::TransferService;
    use super::*;
    use crate::compare::modes::call_error::CallError;
    use crate::compare::modes::mode::Mode;
    use crate::compare::operations::{Operation, Operations, Put};
    use crate::compare::plan::cell::Load;
    use crate::compare::plan::direction::Direction;
    use crate::measure::transport::encode::Encode;
    use crate::measure::transport::http2::Http2;
    use crate::measure::transport::listener::tcp_listener;
    use tonic_rdma_payload::content::check_all;

    /// A source whose answers have a wrong byte, or are too short.
    #[derive(Clone, Copy, Debug)]
    enum FaultySource {
        Wrong(usize),
        Short,
    }

    #[tonic::async_trait]
    impl Source for FaultySource {
        async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetReply>, Status> {
            let GetRequest { origin, seed, bytes } = request.into_inner();
            let mut payload = SourceService::default().payload(origin, seed, bytes)?.to_vec();
            match *self {
                Self::Wrong(at) => payload[at] ^= 4,
                Self::Short => payload.truncate(payload.len() - 8),
            }
            Ok(Response::new(GetReply { payload: payload.into() }))
        }
    }

    async fn caller(source: SourceServer<impl Source>, operations: &Operations) -> GrpcCaller {
        let incoming = tcp_listener().unwrap();
        let address = incoming.local_addr().unwrap();
        let turns = TurnsServer::new(TransferService::default());
        let server = Server::builder().add_service(source).add_service(turns);
        tokio::spawn(server.serve_with_incoming(incoming));
        let channel = connect::tcp(address, Http2::Default).await.unwrap();
        let caller = GrpcCaller::new(channel, Mode::GrpcTcp, Encode::Copy).reducing(true);
        let mut caller = caller.towards(Direction::Down);
        caller.prepare(operations).unwrap();
        caller
    }

    #[tokio::test]
    async fn the_client_finds_wrong_payloads() {
        let operations = Operations::new(Load::Size(100_000), 3, true).unwrap();
        let mut right = caller(SourceService::default().server(), &operations).await;
        for turn in 0..6 {
            for check in [Check::All, Check::Stamps] {
                right.run(&operations.take(turn), check, 1).await.unwrap();
            }
        }
        let Operation::Put(put) = operations.take(0) else { panic!("a size is one payload") };
        let other = Operation::Put(Put { reduced: None, ..put });
        let error = right.run(&other, Check::Stamps, 1).await.unwrap_err();
        assert!(matches!(error, CallError::Consumed { sent: None, .. }), "{error}");

        let mut wrong = caller(SourceServer::new(FaultySource::Wrong(70_001)), &operations).await;
        let error = wrong.run(&operations.take(1), Check::All, 1).await.unwrap_err();
        assert!(matches!(error, CallError::Content { offset: 70_001, sent: 100_000 }), "{error}");
        let mut wrong = caller(SourceServer::new(FaultySource::Wrong(99_999)), &operations).await;
        let error = wrong.run(&operations.take(1), Check::Stamps, 1).await.unwrap_err();
        assert!(matches!(error, CallError::Content { offset: 99_999, .. }), "{error}");
        let mut short = caller(SourceServer::new(FaultySource::Short), &operations).await;
        let error = short.run(&operations.take(1), Check::Stamps, 1).await.unwrap_err();
        assert!(matches!(error, CallError::Length { sent: 100_000, arrived: 99_992 }), "{error}");
        assert!(error.is_mismatch());
    }

    #[tokio::test]
    async fn torn_payloads_are_found_at_the_end_of_the_turn() {
        let operations = Operations::new(Load::Size(1 << 20), 3, true).unwrap();
        let mut wrong =
            caller(SourceServer::new(FaultySource::Wrong(500_000)), &operations).await.reducing(false);
        for turn in 0..4 {
            wrong.run(&operations.take(turn), Check::Stamps, 1).await.unwrap();
        }
        let error = wrong.end().await.unwrap_err();
        assert!(matches!(error, CallError::BufferContent { offset: 500_000, .. }), "{error}");
        // A client that consumes finds the wrong byte in each call.
        let mut wrong = wrong.reducing(true);
        let error = wrong.run(&operations.take(0), Check::Stamps, 1).await.unwrap_err();
        assert!(matches!(error, CallError::Consumed { .. }), "{error}");
    }

    #[test]
    fn every_variant_of_every_content_matches_its_seed() {
        for source in [SourceService::default(), SourceService::registering()] {
            for (origin, bytes) in [(7, 100_001), (7, 64), (u64::MAX - 9, 1)] {
                for variant in 0..VARIANTS {
                    let seed = variant_seed(origin, variant);
                    let payload = source.payload(origin, seed, bytes).unwrap();
                    assert_eq!((payload.len() as u64, check_all(seed, &payload)), (bytes, None));
                }
            }
        }
    }

    #[test]
    fn unknown_seeds_and_too_large_payloads_are_refused() {
        let source = SourceService::default();
        assert_eq!(source.payload(7, 8, 64).unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(source.payload(7, 7, 1 << 62).unwrap_err().code(), Code::ResourceExhausted);
        source.payload(7, 7, 64).unwrap();
    }
}
