//! Our service, which checks payloads byte for byte.

use futures_util::{StreamExt as _, stream};
use tonic::metadata::MetadataValue;
use tonic::{Code, Request, Response, Status, Streaming};

use super::replies::{Replies, within};
use crate::content::Content;
use crate::proto::checked::checked_server::Checked;
use crate::proto::checked::{CheckedReply, CheckedRequest, FailRequest};

/// The service. It has no state.
#[derive(Clone, Copy, Debug)]
pub(super) struct CheckedService;

#[tonic::async_trait]
impl Checked for CheckedService {
    async fn unary(&self, request: Request<CheckedRequest>) -> Result<Response<CheckedReply>, Status> {
        Ok(Response::new(reply(&request.into_inner(), 0)?))
    }

    /// Replies with the payload that the last request asks for.
    async fn collect(
        &self,
        request: Request<Streaming<CheckedRequest>>,
    ) -> Result<Response<CheckedReply>, Status> {
        let mut requests = request.into_inner();
        let mut total = CheckedReply::default();
        while let Some(request) = requests.message().await? {
            let next = reply(&request, 0)?;
            total = CheckedReply {
                received_bytes: total.received_bytes.saturating_add(next.received_bytes),
                first_mismatch: if total.first_mismatch == 0 {
                    next.first_mismatch
                } else {
                    total.first_mismatch
                },
                ..next
            };
        }
        Ok(Response::new(total))
    }

    type ProduceStream = Replies<CheckedReply>;

    async fn produce(
        &self,
        request: Request<CheckedRequest>,
    ) -> Result<Response<Self::ProduceStream>, Status> {
        let request = request.into_inner();
        let checked = reply(&CheckedRequest { reply_bytes: 0, ..request.clone() }, 0)?;
        within(request.reply_bytes as usize)?;
        let replies = stream::iter(0..request.count).map(move |index| {
            let next = reply(&CheckedRequest { payload: Default::default(), ..request.clone() }, index)?;
            let CheckedReply { received_bytes, first_mismatch, .. } = checked;
            Ok(CheckedReply { received_bytes, first_mismatch, ..next })
        });
        Ok(Response::new(replies.boxed()))
    }

    type ExchangeStream = Replies<CheckedReply>;

    async fn exchange(
        &self,
        request: Request<Streaming<CheckedRequest>>,
    ) -> Result<Response<Self::ExchangeStream>, Status> {
        Ok(Response::new(request.into_inner().map(|request| reply(&request?, 0)).boxed()))
    }

    async fn fail(&self, request: Request<FailRequest>) -> Result<Response<CheckedReply>, Status> {
        let FailRequest { code, message, details } = request.into_inner();
        if !(1..=16).contains(&code) {
            return Err(Status::invalid_argument(format!("{code} is no code of an error; 1 to 16 are")));
        }
        let mut status = Status::with_details(Code::from_i32(code), message, details.clone());
        status.metadata_mut().insert_bin("x-checked-bin", MetadataValue::from_bytes(&details));
        Err(status)
    }
}

/// Makes the reply to a request: the result of the check, and the content that the request asks for. `index`
/// is added to the content's seed.
fn reply(request: &CheckedRequest, index: u32) -> Result<CheckedReply, Status> {
    let length = within(request.reply_bytes as usize)?;
    let mismatch = Content { seed: request.seed, period: request.period }.first_mismatch(&request.payload);
    let seed = request.reply_seed.wrapping_add(index);
    Ok(CheckedReply {
        seed,
        payload: Content { seed, period: request.period }.bytes(length),
        received_bytes: request.payload.len() as u64,
        first_mismatch: mismatch.map_or(0, |offset| offset as u64 + 1),
    })
}
