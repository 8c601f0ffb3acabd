//! Plain calls, and calls out of unusual places.

use std::time::Duration;

use bytes::Bytes;
use tonic::{Request, Response};

use crate::caller::Caller;
use crate::column::Column;
use crate::content::{check, message};
use crate::probe::Probe;

pub(crate) async fn one_after_the_other(column: Column) -> String {
    let running = column.serve(Probe::new()).await;
    let mut client = column.client(&running).await;
    for seed in 0..300 {
        check(&client.echo(message(seed, 64)).await.unwrap(), seed, 64);
    }
    "300 answers".to_owned()
}

pub(crate) async fn that_take_a_while(column: Column) -> String {
    let probe = Probe::new().unary(async |request| {
        tokio::time::sleep(Duration::from_millis(50)).await;
        Ok(Response::new(request.into_inner()))
    });
    let running = column.serve(probe).await;
    let mut client = column.client(&running).await;
    for seed in 0..3 {
        check(&client.echo(message(seed, 5000)).await.unwrap(), seed, 5000);
    }
    "OK".to_owned()
}

/// Handlers that compute for a while without an await do not stop calls for good.
pub(crate) async fn whose_handlers_compute(column: Column) -> String {
    let probe = Probe::new().unary(async |request| {
        std::thread::sleep(Duration::from_millis(2));
        Ok(Response::new(request.into_inner()))
    });
    let running = column.serve(probe).await;
    let client = column.client(&running).await;
    let calls: Vec<_> = (0..40)
        .map(|seed| {
            let mut client = client.clone();
            tokio::spawn(async move { check(&client.echo(message(seed, 200)).await.unwrap(), seed, 200) })
        })
        .collect();
    for call in calls {
        call.await.unwrap();
    }
    "40 answers".to_owned()
}

pub(crate) async fn made_by_a_handler(column: Column) -> String {
    let inner = column.serve(Probe::new()).await;
    let client = column.client(&inner).await;
    let probe = Probe::new().unary(move |request| {
        let mut client = client.clone();
        async move { Ok(Response::new(client.echo(request.into_inner()).await?)) }
    });
    let outer = column.serve(probe).await;
    let client = column.client(&outer).await;
    let calls: Vec<_> = (0..50)
        .map(|seed| {
            let mut client = client.clone();
            tokio::spawn(async move { check(&client.echo(message(seed, 5000)).await.unwrap(), seed, 5000) })
        })
        .collect();
    for call in calls {
        call.await.unwrap();
    }
    "50 answers from behind".to_owned()
}

/// A handler calls its own server, over the client's connection, to a certain depth.
pub(crate) async fn made_by_a_handler_to_itself(column: Column) -> String {
    let shared = std::sync::Arc::new(std::sync::OnceLock::<Caller>::new());
    let own = std::sync::Arc::clone(&shared);
    let probe = Probe::new().unary(move |request| {
        let mut client = own.get().unwrap().clone();
        async move {
            let depth = request.get_ref().len();
            let deeper = match depth {
                0 => 0,
                _ => 1 + client.echo(vec![0; depth - 1]).await?.len(),
            };
            Ok(Response::new(vec![0; deeper].into()))
        }
    });
    let running = column.serve(probe).await;
    let mut client = column.client(&running).await;
    shared.set(client.clone()).unwrap();
    let depth = client.echo(vec![0; 20]).await.unwrap().len();
    format!("{depth} calls inside of one another")
}

pub(crate) async fn in_a_future_that_is_polled_by_hand(column: Column) -> String {
    let running = column.serve(Probe::new()).await;
    let client = column.client(&running).await;
    let calls = (0..20).map(|seed| {
        let mut client = client.clone();
        Box::pin(async move { check(&client.echo(message(seed, 700)).await.unwrap(), seed, 700) })
    });
    // One task polls all of them.
    let mut calls: Vec<_> = calls.collect();
    std::future::poll_fn(|context| {
        calls.retain_mut(|call| call.as_mut().poll(context).is_pending());
        if calls.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    "20 answers".to_owned()
}

pub(crate) async fn over_clones_of_a_client(column: Column) -> String {
    let running = column.serve(Probe::new()).await;
    let client = column.client(&running).await;
    for seed in 0..20 {
        // Each clone is dropped after its call.
        let mut clone = client.clone();
        check(&clone.echo(message(seed, 100)).await.unwrap(), seed, 100);
    }
    let mut last = client;
    let reply = last.unary(Request::new(Bytes::from_static(b"last"))).await.unwrap();
    assert_eq!(reply.get_ref(), "last");
    "21 answers".to_owned()
}
