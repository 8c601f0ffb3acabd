//! Decodes Flight's messages into record batches, refuses malformed ones, and counts what was copied.

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use arrow_array::{Array, RecordBatch};
use arrow_buffer::Buffer;
use arrow_data::ArrayData;
use arrow_flight::FlightData;
use arrow_flight::decode::{DecodedFlightData, DecodedPayload, FlightDataDecoder};
use arrow_flight::error::FlightError;
use arrow_schema::{DataType, SchemaRef};
use tokio_stream::{Stream, StreamExt as _};

/// The alignment that Arrow recommends for buffers, in bytes ("Buffer Alignment and Padding" in Arrow's
/// columnar format).
pub const ALIGNMENT: usize = 64;

/// The default of the longest message that clients and servers accept, in bytes.
pub(crate) const DEFAULT_LIMIT: usize = 64 << 20;

/// Where the bytes of the decoded batches are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Record batches that were decoded.
    pub batches: u64,
    /// Messages with a body: record batches and dictionaries.
    pub bodies: u64,
    /// Bodies that began at a multiple of [`ALIGNMENT`] when they arrived. The decoder copies the others.
    pub aligned: u64,
    /// Bytes of the bodies that the decoder copied because they were not aligned.
    pub realigned_bytes: u64,
    /// Buffers of the decoded batches, without empty ones and dictionaries.
    pub buffers: u64,
    /// Buffers that are in the message as it arrived. The others were copied, or decompressed.
    pub in_place: u64,
}

/// The record batches of a stream of Flight's messages: the result of a get, or what a service receives.
/// After an error the stream ends.
///
/// arrow-flight's decoder does the work. It uses a body at a multiple of [`ALIGNMENT`] as it is: the arrays
/// are slices of the memory that the message arrived in, and this memory is given back when the last array is
/// dropped. A body at another address is copied. [`placement`](Self::placement) counts both.
///
/// ```
/// # use arrow_array::record_batch;
/// # use tokio_stream::StreamExt as _;
/// # use tonic_rdma::memory::Pool;
/// use tonic_rdma_flight::{BatchEncoder, BatchStream};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let batch = record_batch!(("id", Int32, [1, 2, 3]))?;
/// # let messages = BatchEncoder::new(&batch.schema(), &Pool::for_sending(1 << 20))?.stream(tokio_stream::iter([Ok(batch)]));
/// let mut batches = BatchStream::new(messages); // a service passes `request.into_inner()`
/// while let Some(batch) = batches.next().await {
///     assert_eq!(batch?.num_rows(), 3);
/// }
/// assert_eq!(batches.placement().realigned_bytes, 0);
/// # Ok(())
/// # }
/// ```
pub struct BatchStream {
    decoder: FlightDataDecoder,
    bodies: Arc<BodyCounts>,
    decoded: Placement,
    is_failed: bool,
}

/// The counts of bodies, shared with the stream that the decoder owns.
#[derive(Debug, Default)]
struct BodyCounts {
    bodies: AtomicU64,
    aligned: AtomicU64,
    realigned_bytes: AtomicU64,
}

impl BodyCounts {
    // Relaxed: the counts guard no other memory.
    fn count(&self, message: &FlightData) {
        let body = &message.data_body;
        if body.is_empty() {
            return;
        }
        self.bodies.fetch_add(1, Ordering::Relaxed);
        if body.as_ptr().addr().is_multiple_of(ALIGNMENT) {
            self.aligned.fetch_add(1, Ordering::Relaxed);
        } else {
            self.realigned_bytes.fetch_add(body.len() as u64, Ordering::Relaxed);
        }
    }
}

impl BatchStream {
    /// Decodes `messages`, such as the request of a put.
    pub fn new<S, E>(messages: S) -> Self
    where
        S: Stream<Item = Result<FlightData, E>> + Send + 'static,
        E: Into<FlightError>,
    {
        let bodies = Arc::new(BodyCounts::default());
        let counts = Arc::clone(&bodies);
        let messages = messages.map(move |message| {
            let message = message.map_err(Into::into)?;
            check(&message)?;
            counts.count(&message);
            Ok(message)
        });
        Self {
            decoder: FlightDataDecoder::new(messages),
            bodies,
            decoded: Placement::default(),
            is_failed: false,
        }
    }

    /// Polls the decoder. It catches panics, because arrow's decoder panics at some malformed messages that
    /// [`check`] accepts, and a peer must not end a task by a message.
    fn poll_decoder(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<DecodedFlightData, FlightError>>> {
        let decoder = &mut self.decoder;
        // After a panic the decoder is not used again.
        let poll = AssertUnwindSafe(|| Pin::new(decoder).poll_next(context));
        catch_unwind(poll).unwrap_or_else(|_| {
            let text = "the peer sent a malformed message: arrow's decoder panicked";
            Poll::Ready(Some(Err(FlightError::DecodeError(text.to_owned()))))
        })
    }

    /// Returns the schema, once it has arrived.
    pub fn schema(&self) -> Option<&SchemaRef> {
        self.decoder.schema()
    }

    /// Returns the counts so far.
    pub fn placement(&self) -> Placement {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Placement {
            bodies: load(&self.bodies.bodies),
            aligned: load(&self.bodies.aligned),
            realigned_bytes: load(&self.bodies.realigned_bytes),
            ..self.decoded
        }
    }
}

impl Stream for BatchStream {
    type Item = Result<RecordBatch, FlightError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        while !self.is_failed {
            let had_schema = self.schema().is_some();
            let message = match std::task::ready!(self.poll_decoder(context)) {
                Some(Ok(message)) => message,
                Some(Err(error)) => {
                    self.is_failed = true;
                    return Poll::Ready(Some(Err(error)));
                }
                None => return Poll::Ready(None),
            };
            match message.payload {
                DecodedPayload::Schema(_) if had_schema => {
                    self.is_failed = true;
                    return Poll::Ready(Some(Err(FlightError::protocol(
                        "the peer sent a second schema in one stream",
                    ))));
                }
                DecodedPayload::Schema(_) | DecodedPayload::None => {}
                DecodedPayload::RecordBatch(batch) => {
                    self.decoded.batches += 1;
                    let body = message.inner.data_body.as_ptr_range();
                    let body = body.start.addr()..body.end.addr();
                    for column in batch.columns() {
                        count_buffers(&column.to_data(), &body, &mut self.decoded);
                    }
                    return Poll::Ready(Some(Ok(batch)));
                }
            }
        }
        Poll::Ready(None)
    }
}

impl fmt::Debug for BatchStream {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("BatchStream")
            .field("schema", &self.schema())
            .field("placement", &self.placement())
            .finish_non_exhaustive()
    }
}

/// Checks that the buffers that a header names are within the body. arrow's decoder panics if one is not.
fn check(message: &FlightData) -> Result<(), FlightError> {
    // The decoder reports headers that can't be read.
    let Ok(header) = arrow_ipc::root_as_message(&message.data_header) else { return Ok(()) };
    let dictionary = header.header_as_dictionary_batch().and_then(|dictionary| dictionary.data());
    let Some(batch) = header.header_as_record_batch().or(dictionary) else { return Ok(()) };
    let malformed =
        |text: String| Err(FlightError::DecodeError(format!("the peer sent a malformed batch: {text}")));
    if batch.length() < 0 {
        return malformed(format!("it has {} rows", batch.length()));
    }
    let length = message.data_body.len();
    for buffer in batch.buffers().into_iter().flatten() {
        let end = buffer.offset().checked_add(buffer.length()).and_then(|end| usize::try_from(end).ok());
        if buffer.offset() < 0 || buffer.length() < 0 || end.is_none_or(|end| end > length) {
            let (at, bytes) = (buffer.offset(), buffer.length());
            return malformed(format!("a buffer of {bytes} bytes at {at} in a body of {length} bytes"));
        }
    }
    for node in batch.nodes().into_iter().flatten() {
        let (rows, nulls) = (node.length(), node.null_count());
        if !(0..=rows).contains(&nulls) {
            return malformed(format!("an array of {rows} rows with {nulls} nulls"));
        }
    }
    Ok(())
}

/// Counts the buffers of an array, and those within `body`.
fn count_buffers(array: &ArrayData, body: &Range<usize>, placement: &mut Placement) {
    let nulls = array.nulls().map(|nulls| nulls.buffer());
    for buffer in array.buffers().iter().chain(nulls).filter(|buffer| !buffer.is_empty()) {
        placement.buffers += 1;
        placement.in_place += u64::from(is_within(buffer, body));
    }
    // The values of a dictionary came with an earlier message.
    if !matches!(array.data_type(), DataType::Dictionary(..)) {
        array.child_data().iter().for_each(|child| count_buffers(child, body, placement));
    }
}

fn is_within(buffer: &Buffer, body: &Range<usize>) -> bool {
    let start = buffer.as_ptr().addr();
    body.start <= start && start + buffer.len() <= body.end
}
