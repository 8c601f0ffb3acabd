//! gRPC's own test service, which follows the public case descriptions.

use std::time::{SystemTime, UNIX_EPOCH};

use futures_util::{Stream, StreamExt as _, TryStreamExt as _, stream};
use tonic::metadata::MetadataValue;
use tonic::{Code, Request, Response, Status, Streaming};

use super::replies::{self, Replies, zeros};
use crate::compression::{Flags, Received, Wanted};
use crate::proto::testing::test_service_server::TestService;
use crate::proto::testing::{
    BoolValue, EchoStatus, Empty, Payload, PayloadType, ResponseParameters, SimpleRequest, SimpleResponse,
    StreamingInputCallRequest, StreamingInputCallResponse, StreamingOutputCallRequest,
    StreamingOutputCallResponse,
};

/// The service. It has no state.
#[derive(Clone, Copy, Debug)]
pub(super) struct OfficialService;

#[tonic::async_trait]
impl TestService for OfficialService {
    async fn empty_call(&self, _: Request<Empty>) -> Result<Response<Empty>, Status> {
        Ok(Response::new(Empty {}))
    }

    async fn unary_call(&self, request: Request<SimpleRequest>) -> Result<Response<SimpleResponse>, Status> {
        let received = received(&request);
        let request = request.into_inner();
        check_compressed(request.expect_compressed, &received)?;
        check_status(request.response_status)?;
        let payload = Some(payload(zeros(request.response_size)?));
        let mut response = Response::new(SimpleResponse { payload, ..Default::default() });
        if !is_true(request.response_compressed) {
            response.disable_compression();
        }
        Ok(response)
    }

    /// Ignores the request's content. The reply is the time, which shows whether the reply came from a cache.
    async fn cacheable_unary_call(
        &self,
        _: Request<SimpleRequest>,
    ) -> Result<Response<SimpleResponse>, Status> {
        // A clock before 1970 gives zero.
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let payload = Some(payload(time.to_string().into()));
        let mut response = Response::new(SimpleResponse { payload, ..Default::default() });
        let control = MetadataValue::from_static("max-age=60, public");
        response.metadata_mut().insert("cache-control", control);
        response.disable_compression();
        Ok(response)
    }

    type StreamingOutputCallStream = Replies<StreamingOutputCallResponse>;

    async fn streaming_output_call(
        &self,
        request: Request<StreamingOutputCallRequest>,
    ) -> Result<Response<Self::StreamingOutputCallStream>, Status> {
        let request = request.into_inner();
        Ok(streaming(|wanted| reply_to(request, wanted)))
    }

    async fn streaming_input_call(
        &self,
        request: Request<Streaming<StreamingInputCallRequest>>,
    ) -> Result<Response<StreamingInputCallResponse>, Status> {
        let received = received(&request);
        let mut requests = request.into_inner();
        let mut total: usize = 0;
        while let Some(request) = requests.message().await? {
            check_compressed(request.expect_compressed, &received)?;
            total = total.saturating_add(request.payload.map_or(0, |payload| payload.body.len()));
        }
        let aggregated_payload_size = i32::try_from(total).map_err(|_| {
            Status::out_of_range(format!("{total} bytes arrived, more than an int32 can hold"))
        })?;
        Ok(Response::new(StreamingInputCallResponse { aggregated_payload_size }))
    }

    type FullDuplexCallStream = Replies<StreamingOutputCallResponse>;

    async fn full_duplex_call(
        &self,
        request: Request<Streaming<StreamingOutputCallRequest>>,
    ) -> Result<Response<Self::FullDuplexCallStream>, Status> {
        let requests = request.into_inner();
        Ok(streaming(|wanted| {
            requests.map_ok(move |request| reply_to(request, wanted.clone())).try_flatten()
        }))
    }

    type HalfDuplexCallStream = Replies<StreamingOutputCallResponse>;

    async fn half_duplex_call(
        &self,
        request: Request<Streaming<StreamingOutputCallRequest>>,
    ) -> Result<Response<Self::HalfDuplexCallStream>, Status> {
        let mut requests = request.into_inner();
        let mut kept = Vec::new();
        let mut asked = 0;
        while let Some(request) = requests.next().await.transpose()? {
            // A request without replies is kept too, because it may have a status.
            asked += request.response_parameters.len().max(1);
            if asked > replies::HALF_DUPLEX_REPLIES {
                let limit = replies::HALF_DUPLEX_REPLIES;
                return Err(Status::resource_exhausted(format!(
                    "the requests ask for more than {limit} replies"
                )));
            }
            kept.push(StreamingOutputCallRequest { payload: None, ..request });
        }
        Ok(streaming(|wanted| stream::iter(kept).flat_map(move |request| reply_to(request, wanted.clone()))))
    }

    async fn unimplemented_call(&self, _: Request<Empty>) -> Result<Response<Empty>, Status> {
        Err(Status::unimplemented("no server implements this method"))
    }
}

/// Makes a response with the stream that `replying` makes, which adds to the [`Flags`] whether each message is
/// compressed.
fn streaming<S>(replying: impl FnOnce(Flags) -> S) -> Response<Replies<StreamingOutputCallResponse>>
where
    S: Stream<Item = Result<StreamingOutputCallResponse, Status>> + Send + 'static,
{
    let wanted = Flags::default();
    let mut response = Response::new(replying(wanted.clone()).boxed());
    response.extensions_mut().insert(Wanted(wanted));
    response
}

/// Returns the replies that one request of a stream asks for, or the status.
fn reply_to(
    request: StreamingOutputCallRequest,
    wanted: Flags,
) -> impl Stream<Item = Result<StreamingOutputCallResponse, Status>> {
    let status = check_status(request.response_status).err().map(Err);
    let replies = stream::iter(request.response_parameters).then(move |parameters| {
        let (wanted, ResponseParameters { size, interval_us, compressed }) = (wanted.clone(), parameters);
        async move {
            let (body, interval) = (zeros(size)?, replies::interval(interval_us)?);
            if !interval.is_zero() {
                tokio::time::sleep(interval).await;
            }
            wanted.push(is_true(compressed));
            Ok(StreamingOutputCallResponse { payload: Some(payload(body)) })
        }
    });
    stream::iter(status).chain(replies)
}

fn payload(body: bytes::Bytes) -> Payload {
    Payload { r#type: PayloadType::Compressable.into(), body }
}

fn is_true(value: Option<BoolValue>) -> bool {
    value.is_some_and(|value| value.value)
}

/// Returns the status that the client asks for as an error, unless it is OK.
fn check_status(status: Option<EchoStatus>) -> Result<(), Status> {
    match status {
        Some(EchoStatus { code, message }) if code != 0 => Err(Status::new(Code::from_i32(code), message)),
        _ => Ok(()),
    }
}

fn received<T>(request: &Request<T>) -> Flags {
    request.extensions().get().map(|Received(flags)| flags.clone()).unwrap_or_default()
}

/// Checks that the next message was compressed, or not, as the client states.
fn check_compressed(expected: Option<BoolValue>, received: &Flags) -> Result<(), Status> {
    let compressed = received.next().ok_or_else(|| Status::internal("a message arrived without a flag"))?;
    let named = |compressed| if compressed { "compressed" } else { "not compressed" };
    match expected {
        Some(BoolValue { value }) if value != compressed => Err(Status::invalid_argument(format!(
            "the message should be {}, but is {}",
            named(value),
            named(compressed)
        ))),
        _ => Ok(()),
    }
}
