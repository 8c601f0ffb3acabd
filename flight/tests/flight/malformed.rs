//! Malformed messages: each is an error, and none ends a task.

use arrow_flight::FlightData;
use arrow_flight::error::FlightError;
use support::Runtime;
use tokio_stream::StreamExt as _;
use tonic_rdma::memory::Pool;
use tonic_rdma_flight::{BatchEncoder, BatchStream};

use crate::batches::of_all_kinds;

fn messages() -> Vec<FlightData> {
    let batch = of_all_kinds(50, 1);
    let mut encoder = BatchEncoder::new(&batch.schema(), &Pool::for_sending(1 << 20)).unwrap();
    encoder.encode(&batch).unwrap()
}

/// Decodes to the first error.
fn decode(messages: Vec<FlightData>) -> Result<usize, FlightError> {
    Runtime::CurrentThread.run(async {
        let mut stream = BatchStream::new(tokio_stream::iter(messages.into_iter().map(Ok::<_, FlightError>)));
        let mut rows = 0;
        while let Some(batch) = stream.next().await {
            match batch {
                Ok(batch) => rows += batch.num_rows(),
                Err(error) => {
                    assert!(stream.next().await.is_none(), "the stream goes on after {error}");
                    return Err(error);
                }
            }
        }
        Ok(rows)
    })
}

#[test]
fn order_and_schemas_are_checked() {
    assert_eq!(decode(messages()).unwrap(), 50);
    let mut without_schema = messages();
    without_schema.remove(0);
    assert!(decode(without_schema).unwrap_err().to_string().contains("prior to Schema"));
    let twice = [messages(), messages()].concat();
    assert!(decode(twice).unwrap_err().to_string().contains("second schema"));
    let mut without_dictionary = messages();
    without_dictionary.remove(1);
    assert!(decode(without_dictionary).is_err());
}

#[test]
fn a_body_that_is_too_short_is_named() {
    for index in 1..messages().len() {
        let mut cut = messages();
        cut[index].data_body = cut[index].data_body.slice(..cut[index].data_body.len() / 2);
        let text = decode(cut).unwrap_err().to_string();
        assert!(text.contains("malformed batch: a buffer of"), "{text}");
    }
}

/// Every byte of every header and body, changed. Each result is a batch or an error.
#[test]
fn changed_bytes_end_no_task() {
    let good = messages();
    let mut errors = 0;
    for (index, message) in good.iter().enumerate() {
        for (at, bit) in (0..message.data_header.len()).map(|at| (at, at % 8)) {
            let mut header = message.data_header.to_vec();
            header[at] ^= 1 << bit;
            let mut changed = good.clone();
            changed[index].data_header = header.into();
            errors += usize::from(decode(changed).is_err());
        }
        for at in (0..message.data_body.len()).step_by(61) {
            let mut body = message.data_body.to_vec();
            body[at] ^= 0x80;
            let mut changed = good.clone();
            changed[index].data_body = body.into();
            errors += usize::from(decode(changed).is_err());
        }
    }
    assert!(errors > 100, "{errors}");
}
