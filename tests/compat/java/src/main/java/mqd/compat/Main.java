package mqd.compat;

/** One behaviour of the Java client against a running broker: {@code Main BOOTSTRAP COMMAND}. Ends with 0 when all of it held, and prints a line for each part. */
public final class Main {
    private Main() {
    }

    public static void main(String[] arguments) throws Exception {
        Setting setting = new Setting(arguments[0]);
        try {
            switch (arguments[1]) {
                case "group" -> ClassicGroups.run(setting);
                case "group848" -> ConsumerGroups.run(setting);
                case "txn" -> Transactions.run(setting);
                case "admin" -> Administration.run(setting);
                case "compaction" -> Compaction.run(setting);
                case "copy" -> CopyJob.run(arguments[0], arguments[2], arguments[3], arguments[4], arguments[5], arguments[6]);
                case "share" -> ShareJob.run(arguments[0], arguments[2], arguments[3]);
                case "partitions" -> Partitions.run(setting);
                default -> throw new IllegalArgumentException("no such command: " + arguments[1]);
            }
            setting.close();
            System.out.println("done " + arguments[1]);
            System.exit(0);
        } catch (Throwable failure) {
            failure.printStackTrace();
            System.exit(1); // with members' threads still polling
        }
    }
}
