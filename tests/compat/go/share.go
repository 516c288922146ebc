package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// numbers produces 0, 1, ... count-1.
func numbers(ctx context.Context, common []kgo.Opt) error {
	client, err := kgo.NewClient(append(slices.Clone(common), kgo.DefaultProduceTopic(*topic),
		kgo.RecordPartitioner(kgo.RoundRobinPartitioner()))...)
	if err != nil {
		return err
	}
	defer client.Close()
	records := make([]*kgo.Record, *count)
	for i := range records {
		records[i] = kgo.StringRecord(fmt.Sprint(i))
	}
	return client.ProduceSync(ctx, records...).FirstErr()
}

// share produces numbers and consumes them in the share group -share: releases those that end in 3 at
// their first delivery, rejects those that end in 7, renews the locks of those that end in 5 before it
// accepts them, and accepts all others. It returns how many it has released, after an answer to each
// acknowledgement.
func share(ctx context.Context, common []kgo.Opt) (released int, err error) {
	if err = numbers(ctx, common); err != nil {
		return 0, err
	}
	var refused error // written by the client's one thread of callbacks, read after Close
	client, err := kgo.NewClient(append(slices.Clone(common), kgo.ConsumeTopics(*topic), kgo.ShareGroup(*group), kgo.ShareMaxRecords(20),
		kgo.ShareMaxRecordsStrict(), kgo.ShareAckCallback(func(_ *kgo.Client, results kgo.ShareAckResults) {
			refused = errors.Join(refused, results.Error())
		}))...)
	if err != nil {
		return 0, err
	}
	defer func() {
		client.Close()
		err = errors.Join(err, refused)
	}()
	for settled := 0; settled < *count; {
		fetches := client.PollFetches(ctx)
		if err = fetches.Err(); err != nil {
			return released, err
		}
		if fetches.NumRecords() > 20 {
			return released, fmt.Errorf("%d records in one fetch", fetches.NumRecords())
		}
		var renewed []*kgo.Record
		fetches.EachRecord(func(record *kgo.Record) {
			switch last := record.Value[len(record.Value)-1]; {
			case last == '3' && record.DeliveryCount() == 1:
				record.Ack(kgo.AckRelease)
				released++
				return
			case last == '7':
				record.Ack(kgo.AckReject)
			case last == '5':
				record.Ack(kgo.AckRenew)
				renewed = append(renewed, record)
			default:
				record.Ack(kgo.AckAccept)
			}
			settled++
		})
		if err = client.FlushAcks(ctx); err != nil {
			return released, err
		}
		for _, record := range renewed {
			if !record.AcquisitionDeadline().After(time.Now()) {
				return released, errors.New("a lock that was renewed has ended")
			}
			record.Ack(kgo.AckAccept)
		}
		if err = client.FlushAcks(ctx); err != nil {
			return released, err
		}
	}
	return released, nil
}
